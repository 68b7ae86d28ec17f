"""What is over is freed at once. Python's collector, which a server runs rarely, has nothing of ours to find.

An error holds the frames that it passed, and these hold all their callers and the arrays there. Where such a frame
holds the error, all of it waits for the collector, beside the budget.
"""

from __future__ import annotations

import errno
import gc
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from interrupts import heard
from outcore import batch_generate, load, stream_generate
from outcore.disk import reader
from outcore.errors import BudgetError, PromptError, ReadError

Act = Callable[[Any, Any], None]
OPTIONS: dict[str, Any] = {"context": 12, "draft": "none", "kv_disk": "off", "govern": False}


class Fourth:
    """A greedy sampler that does something when it is called for the fourth time."""

    def __init__(self, act: Callable[[], None]) -> None:
        self.left, self.act = 4, act

    def __call__(self, logprobs: mx.array) -> mx.array:
        self.left -= 1
        if not self.left:
            self.act()
        return mx.argmax(logprobs, axis=-1)


def fails() -> None:
    raise ValueError("this sampler fails")


def answer(model: Any, tokenizer: Any, tokens: int = 5, prompt: Any = "hi there", **options: Any) -> None:
    for _ in stream_generate(model, tokenizer, prompt, max_tokens=tokens, **options):
        pass


def one_that_outgrows_its_plan(model: Any, tokenizer: Any) -> None:
    answer(model, tokenizer, 12)


def one_that_is_closed(model: Any, tokenizer: Any) -> None:
    responses = stream_generate(model, tokenizer, "hi there", max_tokens=5)
    next(responses)
    next(responses)
    responses.close()  # type: ignore[attr-defined]


def one_whose_sampler_fails(model: Any, tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="this sampler fails"):
        answer(model, tokenizer, sampler=Fourth(fails))


def one_that_ctrl_c_ends(model: Any, tokenizer: Any) -> None:
    with heard(), pytest.raises(KeyboardInterrupt):
        answer(model, tokenizer, sampler=Fourth(lambda: os.kill(os.getpid(), signal.SIGINT)))


def one_that_finds_no_room(model: Any, tokenizer: Any) -> None:
    if not model.outcore.plan.streams:
        return
    with pytest.raises(PromptError):
        answer(model, tokenizer, prompt=[5] * 20_000)


def one_whose_read_fails(model: Any, tokenizer: Any) -> None:
    if not model.outcore.plan.streams:
        return
    read, left = reader.read_chunk, [6]

    def read_some(*args: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:  # the first failure may be of a read that is begun again
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(*args)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(ReadError):
        patch.setattr(reader, "read_chunk", read_some)
        answer(model, tokenizer)


def one_in_a_cache_of_its_callers(model: Any, tokenizer: Any) -> None:
    cache = make_prompt_cache(model)
    answer(model, tokenizer, 3, prompt_cache=cache)
    answer(model, tokenizer, 3, prompt_cache=cache)


def two_that_share_passes(model: Any, tokenizer: Any, **options: Any) -> None:
    batch_generate(model, tokenizer, [tokenizer.encode("hi there"), tokenizer.encode("x")], max_tokens=5, **options)


def two_whose_sampler_fails(model: Any, tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="this sampler fails"):
        two_that_share_passes(model, tokenizer, sampler=Fourth(fails))


ACTS: list[Act] = [
    answer, one_that_outgrows_its_plan, one_that_is_closed, one_whose_sampler_fails, one_that_ctrl_c_ends,
    one_that_finds_no_room, one_whose_read_fails, one_in_a_cache_of_its_callers, two_that_share_passes,
    two_whose_sampler_fails,
]  # fmt: skip


def smallest(folder: Path) -> int:
    with pytest.raises(BudgetError) as refused:
        load(str(folder), memory=1_000_000, **OPTIONS)
    assert refused.value.smallest is not None
    return refused.value.smallest


@pytest.mark.parametrize("kind", ["streamed", "resident"])
def test_answers_leave_nothing_for_the_collector(kind: str, quick_models: Callable[..., Path]) -> None:
    folder = quick_models(2)
    memory = smallest(folder) * 21 // 20 if kind == "streamed" else 300_000_000
    model, tokenizer = load(str(folder), memory=memory, **OPTIONS)
    assert bool(model.outcore.plan.streams) == (kind == "streamed")
    left = {act.__name__: left_by(lambda act=act: act(model, tokenizer)) for act in ACTS}  # type: ignore[misc]
    model.outcore.close()
    assert {name: found for name, found in left.items() if found != (0, set())} == {}


def left_by(act: Callable[[], None]) -> tuple[int, set[str]]:
    """Bytes of arrays that it leaves, and the functions of whose frames there are cycles."""
    act()  # makes room, and imports
    gc.collect()
    gc.disable()
    before = mx.get_active_memory()
    try:
        act()
        more = mx.get_active_memory() - before
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        return max(0, more), {o.f_code.co_qualname for o in gc.garbage if isinstance(o, FrameType)}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def test_a_closed_model_is_gone_when_the_next_is_loaded(quick_models: Callable[..., Path]) -> None:
    """However often, and whenever Python collects garbage: after 25 loads four models' weights were in memory."""
    gc.collect()
    before, after = mx.get_active_memory(), []
    gc.disable()
    try:
        for _ in range(4):
            model, tokenizer = load(str(quick_models(2)), memory=300_000_000, **OPTIONS)
            answer(model, tokenizer, 2)
            model.outcore.close()
            after.append(mx.get_active_memory() - before)
            del model
    finally:
        gc.enable()
    gc.collect()
    assert 0 < max(after) < 3 / 2 * after[0]
    assert mx.get_active_memory() < before + 1000
