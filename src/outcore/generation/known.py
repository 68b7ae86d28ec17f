"""What is known of a prompt before it is computed, and what is kept of it: between the prefix cache and the loops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..context.prefix import CAPTURED, GRID, Found, Recording
from ..runtime.session import Session

__all__ = ["GRID", "Found", "Known", "captured_bytes", "look_up"]


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


def look_up(
    session: Session, tokens: Sequence[int], step: int, *, whole: bool = True, shared: int = 0
) -> tuple[Found | None, Known]:
    """What was kept of a prompt, with the caches that it is in; and what goes with them.

    Args:
        step: tokens of a chunk. Where a block ends within one, nothing is found or kept.
        whole: all of it will do.
        shared: its first tokens, with which others' texts begin too.
    """
    prefix = session.prefix
    if prefix is None or GRID % step or session.plan.kv_slot:
        return None, Known()
    found = prefix.find(tokens, step, whole=whole)
    if found is None:
        return None, Known(recording=prefix.recording(tokens, step, shared=shared))
    recording = prefix.recording(tokens, step, found.tokens, shared) if found.logits is None else None
    session.metrics.prompt_found += found.tokens
    return found, Known(found.tokens, found.logits, recording)


def captured_bytes(session: Session, tokens: int) -> int:
    """Bytes of states that are held while so many tokens of a prompt are computed, to be kept."""
    return CAPTURED * session.size.states if session.prefix is not None and tokens > GRID else 0
