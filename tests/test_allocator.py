"""Wired memory, on a Metal that is not there."""

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
from outcore.calibration.random_model import rig
from outcore.loading.loader import prepare
from outcore.system import allocator
from outcore.system.allocator import generating, wire
from stand_ins import TokensOnly

MOST = 1_000_000_000


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
    monkeypatch.setattr(allocator, "_wired", {})
    monkeypatch.setattr(allocator, "_before", [0])
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
    with rig(prepare(folder, memory="1GB").survey, 1):
        assert limits[-1] > 0
    assert limits[-1] == 0


def test_a_failure_to_wire_is_no_failure(limits: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(_: int) -> int:
        raise RuntimeError("no residency sets")

    monkeypatch.setattr(mx, "set_wired_limit", refuses)
    release = wire(Owner(), 5)
    assert release is not None


def test_elsewhere_nothing_is_wired(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "set_wired_limit", lambda _: pytest.fail("wired"))
    model, _ = outcore.load_model(folder, memory="1GB", context=64)
    with generating(model):
        pass
    model.outcore.close()


def test_views_of_slots_are_evaluated_before_the_first_sweep(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = outcore.load_model(folder, memory="1GB", resident=0, context=64)
    weights = model.outcore.streaming.weights
    assert weights._views.keys() == {
        (n, slot) for n in range(len(weights.units)) for slot in range(len(weights.ring.slots))
    }
    for arrays in weights._views.values():
        for view in arrays:
            with tempfile.NamedTemporaryFile("r", suffix=".dot") as file:
                mx.export_to_dot(file.name, view)
                assert "Slice" not in file.read(), "it is evaluated"
    evaluated: list[Any] = []
    original = mx.eval
    monkeypatch.setattr(mx, "eval", lambda *a: evaluated.append(a) or original(*a))
    ids = mx.array([[1, 2]])
    original(model(ids))
    views = {id(a) for arrays in weights._views.values() for a in arrays}
    assert not [a for call in evaluated for a in call if isinstance(a, mx.array) and id(a) in views]
    assert isinstance(model, nn.Module)
    model.outcore.close()
