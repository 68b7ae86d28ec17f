"""Experts read one by one where the other weights do not fit: what a token reads falls with every byte of memory."""

from __future__ import annotations

import functools
import gc
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.utils
import numpy as np
import numpy.typing as npt
import pytest
from mlx_lm.models.cache import make_prompt_cache

import outcore
import zoo
from outcore.decode.preparation import prepare
from outcore.disk.reader import FileReader
from outcore.engine.session import Session
from outcore.errors import ReadError
from outcore.plan.plan import Plan
from outcore.plan.planner import make_plan, resident_budget, smallest_budget
from outcore.sizes import BLOCK, round_up
from outcore_experts import experts as on_demand
from outcore_experts.expert_cache import CachedSwitch
from outcore_experts.expert_prefetch import ExpertPrefetch

CONTEXT, PROMPT = 64, 32
PASSES = (17, 1, 1, 3, 1, 1)
IDS = [(7 * i * i + 3 * i + 1) % 60 + 1 for i in range(CONTEXT)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers with 16 experts and a shared one beside them."""
    folder = tmp_path_factory.mktemp("trunk") / "model"
    sizes = {"num_experts": 16, "hidden_size": 128, "num_hidden_layers": 3, "vocab_size": 1024}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(zoo.CONFIGS, "qwen2_moe", zoo.CONFIGS["qwen2_moe"] | sizes)
        zoo.save_checkpoint("qwen2_moe", folder)
    return folder


@pytest.fixture(scope="module")
def plans(folder: Path) -> list[Plan]:
    """For 20 budgets from the smallest that works to all in memory."""
    size = prepare(folder, memory="1GB", context=CONTEXT, prompt=PROMPT, draft="none").profile.size
    least, most = smallest_budget(size), resident_budget(size)
    return [make_plan(size, least + n * (most - least) // 19) for n in range(20)]


def logits(model: Any, again: Callable[[Callable[[], Any]], Any] = lambda call: call()) -> npt.NDArray[np.float32]:
    cache, found, at = make_prompt_cache(model), [], 0
    for n in PASSES:
        ids = mx.array(IDS[at : at + n])[None]
        found.append(again(lambda ids=ids: np.array(model(ids, cache=cache))[0]))
        at += n
    return np.concatenate(found)


@functools.cache
def expected(folder: Path) -> npt.NDArray[np.float32]:
    return logits(mlx_lm.utils.load_model(folder)[0])


@contextmanager
def loaded(folder: Path, plan: Plan) -> Iterator[tuple[Any, Session]]:
    how: dict[str, Any] = {"context": CONTEXT, "prompt": PROMPT, "draft": "none", "govern": False}
    expected(folder)
    gc.collect()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    model, _ = outcore.load_model(folder, memory=plan.budget_bytes, **how)
    with model.outcore as session:
        assert session.plan.pools == plan.pools and session.plan.bytes_per_token == plan.bytes_per_token
        yield model, session
        peak = mx.get_peak_memory() - before
        assert peak <= plan.budget_bytes, (peak, plan)


def test_what_a_token_reads_falls_with_every_budget(plans: list[Plan]) -> None:
    reads = [plan.bytes_per_token for plan in plans]
    assert all(b < a for a, b in itertools.pairwise(reads)) and reads[-1] == 0
    assert all(plan.pools and plan.peak_bytes <= plan.budget_bytes for plan in plans[:-1])
    # No byte of memory saves more than a byte, but for what is in memory as a whole or not at all: the head, a cache.
    head, step = 1024 * 128 * 4, plans[1].budget_bytes - plans[0].budget_bytes
    assert max(a - b for a, b in itertools.pairwise(reads[:-1])) < step + head
    assert plans[0].head_streamed and not plans[0].kept and not any(n for _, n in plans[0].pools)
    assert len({plan.head_streamed for plan in plans}) == 2
    assert any(n for _, n in plans[-2].pools) and all(part.experts for part in plans[-2].parts)


def of_use(plans: list[Plan]) -> list[Plan]:
    """The smallest one, the next, which keeps the routers, and one where some layers have caches."""
    return [*plans[:2], next(p for p in plans if len({bool(n) for _, n in p.pools}) == 2)]


def test_the_bits_are_the_resident_models_and_the_bytes_the_plans(folder: Path, plans: list[Plan]) -> None:
    for plan in of_use(plans):
        with loaded(folder, plan) as (model, session):
            assert np.array_equal(logits(model), expected(folder))
            # Tokens by themselves read the units without experts, and the experts that are missing.
            cache, metrics = make_prompt_cache(model), session.metrics
            for n in range(7):
                if n == 3:
                    metrics.reset()
                mx.eval(model(mx.array([[IDS[n]]]), cache=cache))
            assert session.streaming is not None
            trunk = [u.unit.slot_bytes for u in session.streaming.layers.units if not u.experts]
            one: Any = session.size.layers[-1].experts
            missed = (metrics.experts.read + metrics.experts.foreseen) * one.read
            assert metrics.bytes_read == pytest.approx(4 * sum(trunk) + missed, rel=0.03)
            assert metrics.units == 4 * len(trunk) and metrics.misses == 0


@pytest.mark.parametrize("model_type", ["glm4_moe", "jamba"])
def test_other_layers_between(model_type: str, tmp_path: Path) -> None:
    """Layers without experts, and slots too small for any: each layer has a cache of one."""
    folder = zoo.save_checkpoint(model_type, tmp_path / "model")
    least = prepare(folder, memory=1, least=True, experts=1, context=CONTEXT, prompt=PROMPT, draft="none").plan
    assert least.pools and not all(part.experts for part in least.parts)
    how: dict[str, Any] = {"context": CONTEXT, "prompt": PROMPT, "draft": "none", "govern": False, "experts": 1}
    model, _ = outcore.load_model(folder, memory=least.budget_bytes, **how)
    with model.outcore:
        assert np.array_equal(logits(model), expected(folder))


class Eager(ExpertPrefetch):
    """Foresees whatever it can, as if the disk had nothing else to do."""

    def routed(self, switch: CachedSwitch, wanted: set[int]) -> None:
        super().routed(switch, wanted)
        self._credit, self._on, self._stall, self._idle = 4.0, True, 1.0, 0.0


def test_what_fails_in_the_middle_changes_nothing(
    folder: Path, plans: list[Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads of experts and of other units, and interrupts between units; with look-ahead wherever it is possible."""
    monkeypatch.setattr(on_demand, "ExpertPrefetch", Eager)
    whole, fails, interrupts = FileReader.submit, itertools.cycle([False] * 50 + [True] * 6), itertools.count(1)
    failures = list[str]()

    def submit(self: FileReader, name: str, *args: Any, **more: Any) -> Any:
        read = whole(self, name, *args, **more)
        if next(fails):
            read.wait_quietly()
            read.error = ReadError(f"the disk fails at {name}")
        return read

    def interrupt() -> None:
        if not next(interrupts) % 61:
            raise KeyboardInterrupt

    def again(call: Callable[[], Any]) -> Any:
        for _ in range(60):
            try:
                return call()
            except (ReadError, KeyboardInterrupt) as e:
                failures.append(str(e))
        raise AssertionError("it never succeeds")

    for plan in plans[:2]:
        with loaded(folder, plan) as (model, session), monkeypatch.context() as patch:
            assert session.streaming is not None
            patch.setattr(FileReader, "submit", submit)
            session.streaming.after_unit.append(interrupt)
            assert np.array_equal(logits(model, again), expected(folder))
            foreseen = session.metrics.experts.foreseen
    assert foreseen, "look-ahead is possible where routers are in memory"
    assert any("expert" in line for line in failures) and "" in failures
    assert any(line and "expert" not in line for line in failures)


def test_a_longer_text_takes_its_memory_from_what_was_kept(folder: Path, plans: list[Plan]) -> None:
    plan = next(p for p in plans if any(n for _, n in p.pools))
    with loaded(folder, plan) as (model, session):
        session.residency.reserve(4 * CONTEXT, 2 * PROMPT)
        assert session.plan.context >= 4 * CONTEXT and session.plan.peak_bytes <= plan.budget_bytes
        assert session.plan.bytes_per_token > plan.bytes_per_token
        assert np.array_equal(logits(model), expected(folder))


def test_blocks_are_counted(folder: Path) -> None:
    """What a disk reads of an expert are whole blocks."""
    size = prepare(folder, memory=1, least=True, context=CONTEXT, prompt=PROMPT, draft="none").profile.size
    experts: Any = size.layers[-1].experts
    assert experts.read % BLOCK == 0 and experts.resident <= experts.read <= round_up(experts.resident, BLOCK) * 2
