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

# Prompt tokens per chunk in mlx-lm's ``generate_step``, which may quantize keys and values after each chunk.
MLX_LM_STEP = 2048


@dataclass(frozen=True)
class KvBits:
    """mlx-lm's ``kv_bits`` and the arguments that go with it. Keys and values are quantized once there are ``start``
    tokens; of a prompt, this is checked after each chunk of ``step`` tokens."""

    bits: int
    group_size: int
    start: int
    step: int


@dataclass(frozen=True)
class Pass:
    """A forward pass over ``tokens`` tokens (0: unknown). ``run`` builds its graph and returns logits (1, tokens,
    vocabulary)."""

    run: Callable[[], mx.array]
    tokens: int


class HiddenKeeper(Protocol):
    """Keeps hidden states (1, tokens, hidden) of a text's latest tokens for a drafter. Every call of the model runs
    inside ``watch``.

    Attributes:
        arrays: the states, to be evaluated with the pass that made them.
        end: position after the last token whose state was seen.
        window: the most tokens whose states are kept.
    """

    end: int
    window: int

    @property
    def arrays(self) -> list[mx.array]: ...

    def expect(self, tokens: int) -> None:
        """Called before a prompt is computed that ends at this position."""

    def watch(self, first: int, tokens: int) -> AbstractContextManager[None]:
        """Returns a context that keeps the states of a pass built inside, over ``tokens`` tokens from ``first`` on."""

    def settle(self) -> None: ...

    def cut(self, end: int) -> None:
        """Drops the states from this position on."""


def run_passes(
    session: Session,
    passes: Sequence[Pass],
    wanted: Collection[int],
    between: Callable[[int, Sequence[mx.array]], object],
    *,
    prompts: int = 0,
    context: int = 0,
) -> list[mx.array]:
    """Runs passes and returns the output of the ``wanted`` ones. If they can be shared, each layer is read once and
    computed for all of them; otherwise they run one after the other.

    Args:
        wanted: indices of passes whose output is returned.
        between: called after all passes but the last, with the number of passes done and the latest wanted output. It
            has to evaluate that and the caches, since a graph that is queued all at once needs all its memory at once.
        prompts: how many of the first passes are of prompts; these share a reading as far as there is memory for their
            graphs.
        context: tokens of the longest of these prompts, with those in its caches.
    """
    runner, rows = pass_runner(session.streaming, session.transport), list[mx.array]()
    # Without a runner, the model reads no weights, or its graph cannot be built before they are read.
    each_alone = runner is None or (len(passes) == 1 and not prompts)
    counts = [1] * len(passes) if each_alone else [0]
    if prompts and not each_alone:
        lengths = [each.tokens for each in passes[:prompts]]
        graph = session.size.graph(on_cpu(), session.plan.split)
        (most,) = session.transport.leasts([session.size.in_reading(max(session.plan.prefill_step, *lengths))])
        counts = list(session.transport.numbers(lambda: graph.readings(lengths, context, most)))
    counts[-1] += len(passes) - sum(counts)
    at = 0
    for count in counts:
        share, mine = passes[at : at + count], [n - at for n in wanted if at <= n < at + count]
        if runner is None or each_alone:
            made = [share[0].run()]
            if not mine:
                made.clear()  # an unused output would keep its inputs alive, caches above all
        else:
            tokens = sum(each.tokens for each in share) if all(each.tokens for each in share) else None
            made = runner.run_passes([each.run for each in share], tokens=tokens, wanted=mine)
        rows += made
        at += count
        if at < len(passes):
            between(at, made)
            check()
    return rows


def chunks(total: int, step: int, within: int | None = None) -> list[slice]:
    """Cuts a prompt as mlx-lm does: ``step`` tokens at a time, and the last token by itself. No chunk crosses a
    multiple of ``within``."""
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
    """Runs a generation inside mlx-lm's ``wired_limit``, then sets Outcore's limits again: mlx-lm restores the limit
    that it found, which may be from before a model was loaded."""
    try:
        with wired_limit(model, [generation_stream]):
            yield
    finally:
        limits.renew()
