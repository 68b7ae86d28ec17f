"""What is known of a prompt before it is computed, and what is kept of it: between the prefix cache and the loops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from ..engine.session import Session
from ..sizes import held_bytes
from .kv_slices import KvBits
from .prefix import CAPTURED, GRID, PrefixMatch, Recording

__all__ = ["Known", "KvBits", "PrefixMatch", "block_step", "captured_bytes", "look_up", "unkept"]


@dataclass(frozen=True)
class Known:
    """Of a prompt.

    Attributes:
        held: its first tokens, which the caches hold.
        logits: (1, vocabulary) of its last position, where they hold all of it.
        recording: what keeps the rest; None: nothing does.
    """

    held: int = 0
    logits: mx.array | None = None
    recording: Recording | None = None

    def passed(self, cache: Sequence[Any], tokens: int) -> None:
        """A chunk's graph was built that ends behind so many tokens of those that are computed."""
        if self.recording is not None:
            self.recording.passed(self.held + tokens, cache)

    def save(self, cache: Sequence[Any], logits: mx.array) -> None:
        """The prompt was computed."""
        if self.recording is not None:
            self.recording.save(cache, logits)

    def save_part(self, cache: Sequence[Any]) -> None:
        """What is ``held`` was computed, and the rest will not be kept."""
        if self.recording is not None:
            self.recording.save_part(cache, self.held)


def block_step(step: int) -> int:
    """The largest chunk of a prompt, in tokens, that is no larger than this and ends where each block does."""
    return next(tokens for tokens in range(min(step, GRID), 0, -1) if GRID % tokens == 0)


def look_up(
    session: Session,
    tokens: Sequence[int],
    step: int,
    *,
    whole: bool = True,
    shared: int = 0,
    kv: KvBits | None = None,
) -> tuple[PrefixMatch | None, Known]:
    """What was kept of a prompt, with the caches that it is in; and what goes with them.

    Args:
        step: tokens of a chunk. Where a block ends within one, nothing is found or kept.
        whole: all of it will do.
        shared: its first tokens, with which others' texts begin too.
        kv: how keys and values are quantized; None: they are not.
    """
    prefix = session.prefix
    if prefix is None or GRID % step or session.plan.kv_slot:
        return None, Known()
    if kv is not None and not (kv.cuts(step, GRID) and prefix.quantizes()):
        return None, Known()
    found = prefix.find(tokens, step, whole=whole, kv=kv)
    if found is None:
        return None, Known(recording=prefix.recording(tokens, step, shared=shared, kv=kv))
    recording = prefix.recording(tokens, step, found.tokens, shared, kv) if found.logits is None else None
    session.metrics.prompt_found += found.tokens
    return found, Known(found.tokens, found.logits, recording)


def unkept(session: Session, known: Known, tokens: int) -> Known:
    """The same of a prompt of so many tokens, of which nothing is kept, as there is no memory for it; it is told."""
    if known.recording is None:
        return known
    session.note(f"prefix cache: a prompt of {tokens} tokens is not kept, as memory is too small for that")
    return replace(known, recording=None)


def captured_bytes(session: Session, tokens: int, kv: KvBits | None = None) -> int:
    """Bytes that are held while so many tokens of a prompt are computed, to be kept: of states; and beside keys and
    values that are quantized, what they were before, which is what the plan counts."""
    if session.prefix is None or session.plan.kv_slot or tokens <= GRID:
        return 0
    quantized = kv is not None and kv.quantized(tokens, tokens)
    beside = int(kv.share * held_bytes(session.size.growing, tokens)) if kv is not None and quantized else 0
    return CAPTURED * session.size.states + beside
