"""Forward passes over a chunk of a prompt or over the newest tokens; several can share one reading of the weights.

mlx-lm's own loop reads a prompt in chunks, its last token apart, and looks one step ahead: three readings of all
weights before the first token and one more after the last. Here the same chunks, and so the same bits, are computed
together layer by layer.
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

# Prompt tokens per chunk in mlx-lm's ``generate_step``, after which it looks whether to quantize.
MLX_LM_STEP = 2048


@dataclass(frozen=True)
class KvBits:
    """mlx-lm's ``kv_bits`` and the arguments that go with it: keys and values are quantized from the token ``start``
    on, which mlx-lm checks after each chunk of ``step`` prompt tokens."""

    bits: int
    group_size: int
    start: int
    step: int


@dataclass(frozen=True)
class Pass:
    """A forward pass over so many tokens (0: unknown); ``run`` builds it and returns logits (1, tokens, vocabulary)."""

    run: Callable[[], mx.array]
    tokens: int


class HiddenKeeper(Protocol):
    """Keeps hidden states (1, tokens, hidden) of a text's latest tokens for a drafter. Everything that computes logits
    runs inside ``watch``.

    Attributes:
        arrays: what it holds, to be evaluated with the pass that made it.
        end: the token after the last one whose state was seen.
        window: the most tokens whose states it keeps.
    """

    end: int
    window: int

    @property
    def arrays(self) -> list[mx.array]: ...

    def expect(self, tokens: int) -> None:
        """A prompt is computed that ends before this token."""

    def watch(self, first: int, tokens: int) -> AbstractContextManager[None]:
        """Keep the states of the pass that is built inside, over so many tokens from ``first`` on."""

    def settle(self) -> None: ...

    def cut(self, end: int) -> None:
        """Forget the states from this token on."""


def run_passes(
    session: Session,
    passes: Sequence[Pass],
    wanted: Collection[int],
    between: Callable[[int, Sequence[mx.array]], object],
    *,
    prompts: int = 0,
    context: int = 0,
) -> list[mx.array]:
    """Runs passes and returns the output of the ``wanted`` ones: layer by layer over all passes where weights are
    streamed, so that they are read once; else one after the other.

    Args:
        wanted: indices of passes whose output is returned.
        between: called after passes that are not the last, with their number and their wanted output; it evaluates that
            and the caches, since a graph queued all at once needs all its memory at once.
        prompts: the first so many passes are of prompts, which share a reading as far as there is memory for their
            graphs.
        context: tokens that the longest of them has, with all before it.
    """
    runner, rows = pass_runner(session.streaming, session.transport), list[mx.array]()
    # Without shared passes a model reads no weights, or its graph cannot be built ahead of them.
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
                made.clear()  # an unused output would keep its inputs alive, caches above all
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
    """mlx-lm's cut of a prompt: ``step`` tokens at a time, and the last token by itself; no chunk crosses a multiple of
    ``within``."""
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
    """mlx-lm's ``wired_limit`` around a generation. It restores the limit that it found, which may be older than a
    model, so ours is set again."""
    try:
        with wired_limit(model, [generation_stream]):
            yield
    finally:
        limits.renew()
