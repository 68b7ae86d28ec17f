"""Forward passes of a model: over a chunk of a prompt, or over the newest tokens; several share what is read.

mlx-lm's own loop reads a prompt in chunks, its last token apart, and looks one step ahead: three times through all
weights before the first token and one more after the last. Here the same chunks, so the same bits, are computed layer
by layer together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream, wired_limit

from ..engine.session import Session
from ..engine.transport import pass_runner
from ..machine.allocator import limits
from ..machine.device import on_cpu
from ..machine.interrupts import check

MLX_LM_STEP = 2048
"""Tokens of a prompt that mlx-lm computes at a time (``generate_step``), after which it looks whether to quantize."""


@dataclass(frozen=True)
class KvBits:
    """How mlx-lm quantizes a text's keys and values: ``kv_bits`` and what goes with it in ``generate_step``.

    Attributes:
        start: token from which it does.
        step: tokens of its chunks of a prompt, behind which it looks whether so many are there.
    """

    bits: int
    group_size: int
    start: int
    step: int


@dataclass(frozen=True)
class Pass:
    """One over so many tokens (0: many); ``run`` builds it, and returns logits (1, tokens, vocabulary)."""

    run: Callable[[], mx.array]
    tokens: int


class HiddenKeeper(Protocol):
    """Keeps hidden states of a text's tokens, (1, tokens, hidden), for what drafts from them: behind the last layer, or
    behind others. What is called on the way to logits is called inside ``watch``.

    Attributes:
        arrays: what it holds, to be evaluated with the pass that made it.
        end: the token behind the last one whose state was seen. ``window``: tokens whose states it keeps.
    """

    end: int
    window: int

    @property
    def arrays(self) -> list[mx.array]: ...

    def expect(self, tokens: int) -> None:
        """A prompt is computed that ends before this token."""

    def watch(self, first: int, tokens: int) -> AbstractContextManager[None]:
        """Keep the states of a pass over so many tokens from ``first`` on, which is built inside."""

    def settle(self) -> None:
        """What is held was evaluated."""

    def cut(self, end: int) -> None:
        """Forget the states of tokens from this one on: they are not part of the text."""


def run_passes(
    session: Session,
    passes: Sequence[Pass],
    wanted: Collection[int],
    between: Callable[[int, Sequence[mx.array]], object],
    *,
    prompts: int = 0,
    context: int = 0,
) -> list[mx.array]:
    """What the ``wanted`` of some passes put out, by their numbers: layer by layer over all passes where weights are
    streamed, so that they are read once; else one after the other.

    Args:
        between: called behind passes that are not the last, with how many there were, and what the newest of them put
            out that is wanted: it evaluates that and what they left behind. What is queued all at once needs memory all
            at once.
        prompts: the first so many are of prompts, which are computed together as far as there is memory for their
            graphs; ``context``: tokens that the longest of them has, with all before it.
    """
    runner, rows = pass_runner(session.streaming, session.transport), list[mx.array]()
    # Such a model's graph cannot be built ahead of its weights, or it has none to read.
    each_alone = runner is None or (len(passes) == 1 and not prompts)
    counts = [1] * len(passes) if each_alone else [0]
    if prompts and not each_alone:
        lengths = [each.tokens for each in passes[:prompts]]
        counts = list(session.transport.numbers(lambda: session.size.graph(on_cpu()).sweeps(lengths, context)))
    counts[-1] += len(passes) - sum(counts)
    at = 0
    for count in counts:
        share, mine = passes[at : at + count], [n - at for n in wanted if at <= n < at + count]
        if runner is None or each_alone:
            made = [share[0].run()]
            if not mine:
                made.clear()  # what nobody wants would hold what it is made from, caches above all
        else:
            made = runner.run_passes(
                [each.run for each in share], tokens=sum(each.tokens for each in share) or None, wanted=mine
            )
        rows += made
        at += count
        if at < len(passes):
            between(at, made)
            check()
    return rows


def chunks(total: int, step: int, within: int | None = None) -> list[slice]:
    """mlx-lm's cut of a prompt: ``step`` tokens at a time, and the last token by itself.

    Args:
        within: tokens of longer chunks that none of these may pass the end of.
    """
    long = within or max(total, 1)
    ends = [*range(long, total - 1, long), max(0, total - 1)]
    parts = [
        slice(a, min(a + step, end))
        for begin, end in zip([0, *ends[:-1]], ends, strict=True)
        for a in range(begin, end, step)
    ]
    return [*parts, slice(total - 1, total)]


@contextmanager
def generating(model: nn.Module) -> Iterator[None]:
    """mlx-lm's ``wired_limit`` around a generation: it wires all, and puts back what was there, which may be older than
    a model."""
    try:
        with wired_limit(model, [generation_stream]):
            yield
    finally:
        limits.renew()
