"""MLX's limits as several models share them; wired memory on a Metal that is not there."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.generate import stream_generate as their_stream_generate

import outcore
import zoo
from outcore.decode.passes import generating
from outcore.decode.preparation import prepare
from outcore.machine import allocator
from outcore.machine.allocator import AllocatorLimits, Needs
from outcore.machine.allocator import limits as process
from outcore_calibrate.layer_times import rig
from stand_ins import TokensOnly

MOST = 1_000_000_000


def wire(owner: object, nbytes: int) -> Any:
    return process.hold(owner, Needs(wired=nbytes))


class Owner:
    """What memory is wired for."""


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Metal's wired limits, one after the other, as MLX keeps them: it refuses more than the device recommends."""
    found = [0]

    def set_limit(nbytes: int) -> int:
        if nbytes > MOST:
            raise ValueError("[metal::set_wired_limit] Setting a wired limit larger than the maximum working set size")
        found.append(nbytes)
        return found[-2]

    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "set_wired_limit", set_limit)
    info = {"max_recommended_working_set_size": MOST, "memory_size": 2 * MOST}
    monkeypatch.setattr(mx, "device_info", lambda *_: info)
    monkeypatch.setattr(process, "_needs", {})
    monkeypatch.setattr(process, "_releases", {})
    monkeypatch.setattr(process, "_limits", {})
    yield found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return zoo.save_checkpoint("llama", tmp_path_factory.mktemp("models") / "m")


def test_sessions_wire_what_they_planned_until_they_are_closed(folder: Path, limits: list[int]) -> None:
    first, _ = outcore.load_model(folder, memory="900MB", context=64)
    one = first.outcore.plan.peak_bytes
    assert limits[-1] == one
    second, _ = outcore.load_model(folder, memory="900MB", context=64, resident=1)
    both = one + second.outcore.plan.peak_bytes
    assert limits[-1] == both
    first.outcore.close()
    first.outcore.close()
    assert limits[-1] == both - one
    # A model that is dropped, unclosed.
    del second
    gc.collect()
    assert limits[-1] == 0


def test_no_more_is_wired_than_the_device_recommends(limits: list[int]) -> None:
    owner = Owner()
    release = wire(owner, 3 * MOST)
    assert limits[-1] == MOST and release is not None
    release()
    assert limits[-1] == 0


def test_what_was_wired_before_comes_back(limits: list[int]) -> None:
    limits.append(777)
    first, second = Owner(), Owner()
    one, two = wire(first, 5), wire(second, 6)
    assert limits[-1] == 11 and one is not None and two is not None
    one()
    two()
    assert limits[-1] == 777


def test_mlx_lms_restoring_undoes_nothing(folder: Path, limits: list[int]) -> None:
    model, _ = outcore.load_model(folder, memory="900MB", context=64)
    mine = limits[-1]
    with generating(model):
        assert limits[-1] == MOST
        other = Owner()
        wire(other, 5)
    assert limits[-1] == mine + 5, "what began meanwhile is wired too"
    for resident in (None, 1):
        loaded, _ = outcore.load_model(folder, memory="900MB", context=64, resident=resident)
        before = limits[-1]
        list(outcore.stream_generate(loaded, TokensOnly(), [3, 4], max_tokens=2))
        assert limits[-1] == before and MOST in limits
        # Mlx-lm's own functions restore what was there.
        list(their_stream_generate(loaded, TokensOnly(), [3, 4], max_tokens=2))
        assert limits[-1] == before
        loaded.outcore.close()
    del other
    model.outcore.close()


def test_calibration_is_wired_too(folder: Path, limits: list[int]) -> None:
    with rig(prepare(folder, memory="1GB").profile, 1):
        assert limits[-1] > 0
    assert limits[-1] == 0


def test_a_failure_to_wire_is_no_failure(limits: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(_: int) -> int:
        raise RuntimeError("no residency sets")

    monkeypatch.setattr(mx, "set_wired_limit", refuses)
    owner = Owner()
    assert wire(owner, 5) is not None


def test_elsewhere_nothing_is_wired(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "set_wired_limit", lambda _: pytest.fail("wired"))
    model, _ = outcore.load_model(folder, memory="1GB", context=64)
    with generating(model):
        pass
    model.outcore.close()


def test_views_of_slots_are_evaluated_before_the_first_pass(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = outcore.load_model(folder, memory="1GB", resident=0, context=64)
    weights = model.outcore.streaming.layers.weights
    assert weights.views.keys() == {
        (n, slot) for n in range(len(weights.units)) for slot in range(len(weights.ring.slots))
    }
    for arrays in weights.views.values():
        for view in arrays:
            with tempfile.NamedTemporaryFile("r", suffix=".dot") as file:
                mx.export_to_dot(file.name, view)
                assert "Slice" not in file.read(), "it is evaluated"
    evaluated: list[Any] = []
    original = mx.eval
    monkeypatch.setattr(mx, "eval", lambda *a: evaluated.append(a) or original(*a))
    ids = mx.array([[1, 2]])
    original(model(ids))
    views = {id(a) for arrays in weights.views.values() for a in arrays}
    assert not [a for call in evaluated for a in call if isinstance(a, mx.array) and id(a) in views]
    assert isinstance(model, nn.Module)
    model.outcore.close()


@pytest.fixture
def before() -> Iterator[tuple[int, int]]:
    """Limits of this process's own for memory and freed memory, which are there again afterwards."""
    gc.collect()
    assert not process.held, "a test before left a model"
    old = mx.set_memory_limit(2**40 + 7), mx.set_cache_limit(2**30 + 7)
    yield 2**40 + 7, 2**30 + 7
    assert now() == (2**40 + 7, 2**30 + 7)
    mx.set_memory_limit(old[0])
    mx.set_cache_limit(old[1])


def now() -> tuple[int, int]:
    """Limits as they are."""
    memory, cache = mx.set_memory_limit(2**40), mx.set_cache_limit(2**30)
    mx.set_memory_limit(memory)
    mx.set_cache_limit(cache)
    return memory, cache


def needs(session: Any) -> tuple[int, int]:
    plan = session.plan
    spare = 0 if plan.streams else max(0, plan.budget_bytes - plan.peak_bytes)
    return plan.budget_bytes - plan.allocator_bytes - session.size.ahead(
        plan.prefill_step
    ), plan.allocator_bytes + spare


@pytest.mark.parametrize("memory", ["100MB", "2MB"])
def test_memory_in_use_and_freed_memory_have_one_budget(folder: Path, before: tuple[int, int], memory: str) -> None:
    """MLX fills both: it allocates ahead up to the one limit, and keeps freed memory up to the other."""
    model, _ = outcore.load_model(folder, memory=memory, context=64, resident=0, draft="none")
    with model.outcore as session:
        assert sum(now()) <= session.plan.budget_bytes


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("resident", [(0, 0), (0, None)])
def test_two_models_add_up_and_what_was_there_comes_back(
    folder: Path, before: tuple[int, int], resident: tuple[int | None, int | None], order: tuple[int, int]
) -> None:
    models = [outcore.load_model(folder, memory="100MB", context=64, resident=r)[0] for r in resident]
    asked = [needs(m.outcore) for m in models]
    assert now() == (asked[0][0] + asked[1][0], asked[0][1] + asked[1][1])
    first, second = (models[i] for i in order)
    answers = [[r.token for r in outcore.stream_generate(m, TokensOnly(), [3, 4, 5], max_tokens=3)] for m in models]
    assert answers[0] == answers[1]
    first.outcore.close()
    streams = second.outcore.plan.streams
    assert now() == (asked[order[1]][0] if streams else before[0], asked[order[1]][1])
    second.outcore.close()
    second.outcore.close()


def test_an_exception_while_loading_leaves_the_limits(
    folder: Path, before: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    for resident, broken in ((0, "Ring"), (None, "make_resident")):
        with monkeypatch.context() as patched:
            patched.setattr(f"outcore.engine.engine.{broken}", fails)
            with pytest.raises(KeyboardInterrupt):
                outcore.load_model(folder, memory="100MB", context=64, resident=resident)
        assert now() == before and not process.held


def test_a_models_change_of_plan_changes_what_it_needs(folder: Path, before: tuple[int, int]) -> None:
    model, _ = outcore.load_model(folder, memory="100MB", context=64)
    assert now()[0] == before[0], "nothing is streamed"
    model.outcore.residency.layers.shed(1)
    assert now() == needs(model.outcore)
    model.outcore.close()


def test_a_model_that_drafts_gives_back_what_it_needed_with_the_one_that_it_drafts_for(
    folder: Path, before: tuple[int, int]
) -> None:
    model, _ = outcore.load_model(folder, memory="100MB", context=64, resident=0, draft=str(folder))
    assert now()[0] != before[0]
    list(outcore.stream_generate(model, TokensOnly(), [3, 4, 5], max_tokens=3))
    model.outcore.close()
    assert now() == before


def test_limits_that_the_user_sets_meanwhile_stay(folder: Path, before: tuple[int, int]) -> None:
    model, _ = outcore.load_model(folder, memory="100MB", context=64, resident=0)
    mx.set_cache_limit(12345)
    list(outcore.stream_generate(model, TokensOnly(), [3, 4, 5], max_tokens=2))
    assert now()[1] == 12345
    model.outcore.close()
    assert now() == (before[0], 12345)
    mx.set_cache_limit(before[1])


def test_a_forked_process_sets_no_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    own, owner = AllocatorLimits(), Owner()
    release = own.hold(owner, Needs(wired=1))
    with monkeypatch.context() as patched:
        patched.setattr(allocator.os, "getpid", lambda: 1)
        patched.setattr(mx, "set_cache_limit", lambda _: pytest.fail("MLX hangs here"))
        own.hold(owner, Needs(cache=5))
        release()


def test_a_model_that_is_collected_while_limits_are_set_leaves_nothing(
    before: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    own, first, second = AllocatorLimits(), Owner(), Owner()
    gone = own.hold(first, Needs(cache=1000, memory=10**9, waits=True))
    original, done = mx.set_memory_limit, list[int]()

    def collects(nbytes: int) -> int:
        if not done:
            done.append(1)
            gone()
        return original(nbytes)

    with monkeypatch.context() as patched:
        patched.setattr(mx, "set_memory_limit", collects)
        release = own.hold(second, Needs(cache=2000))
    assert now() == (before[0], 2000)
    release()


def test_a_closed_model_takes_no_limits_again(folder: Path, before: tuple[int, int]) -> None:
    model, _ = outcore.load_model(folder, memory="100MB", context=64)
    first = [r.token for r in outcore.stream_generate(model, TokensOnly(), [3, 4, 5], max_tokens=3)]
    model.outcore.close()
    # It is all in memory, and answers; whatever the text, its plan stays as it is.
    plan = model.outcore.plan
    long = [3 + i % 50 for i in range(300)]
    assert [r.token for r in outcore.stream_generate(model, TokensOnly(), [3, 4, 5], max_tokens=3)] == first
    list(outcore.stream_generate(model, TokensOnly(), long, max_tokens=3))
    assert now() == before and not process.held and model.outcore.plan is plan


def test_an_overlay_is_packed_under_no_models_limits(
    folder: Path, before: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr("outcore.engine.session.pack_overlay", lambda *_: seen.append(now()))
    model, _ = outcore.load_model(folder, memory="100MB", context=64, resident=0)
    assert seen == [before] and now() != before
    model.outcore.close()


def test_the_users_peak_counter_is_left_alone(folder: Path) -> None:
    big = mx.zeros((64 << 20,), mx.uint8)
    mx.eval(big)
    peak = mx.get_peak_memory()
    del big
    model, _ = outcore.load_model(folder, memory="100MB", context=64, resident=0)
    assert mx.get_peak_memory() >= peak
    model.outcore.close()


def test_what_needs_nothing_of_a_limit_leaves_it(before: tuple[int, int]) -> None:
    own, owner = AllocatorLimits(), Owner()
    own.hold(owner, Needs(wired=5))
    assert now() == before
    release = own.hold(owner, Needs(cache=1000))
    assert now() == (before[0], 1000)
    assert own.hold(owner, Needs(memory=10**9, waits=True)) is release
    assert now() == (10**9, before[1])
    release()


def test_what_failed_before_on_mlxs_streams_is_not_raised_by_a_limit(
    before: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    original, failed = mx.set_cache_limit, ["[read] Unable to read from file."] * 2

    def raises(nbytes: int) -> int:
        if failed:  # once for each stream, before anything is done: MLX's synchronize_cpu_streams
            raise RuntimeError(failed.pop())
        return original(nbytes)

    own, owner = AllocatorLimits(), Owner()
    monkeypatch.setattr(process, "counts", True)
    monkeypatch.setattr(mx, "set_cache_limit", raises)
    release = own.hold(owner, Needs(cache=2000))
    assert now() == (before[0], 2000)
    failed += ["[read] Unable to read from file."] * 2
    release()
    assert now() == before


def test_what_cannot_be_set_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(nbytes: int) -> int:
        raise RuntimeError("never")

    monkeypatch.setattr(process, "counts", True)
    with pytest.raises(RuntimeError, match="never"):
        allocator.despite_old_errors(refuses, 1)
    assert not process.counts


def test_once_mlx_failed_it_waits_at_no_memory_limit(before: tuple[int, int]) -> None:
    own, first, second = AllocatorLimits(), Owner(), Owner()
    release = own.hold(first, Needs(cache=1000, memory=10**9, waits=True))
    assert now() == (10**9, 1000)
    own.mistrust()
    assert now() == (before[0], 1000)
    also = own.hold(second, Needs(cache=1000, memory=10**9, waits=True))
    assert now() == (before[0], 2000)
    release()
    also()
    assert now() == before
