"""The seam to what keeps computed prompts (``outcore_prefix``, on disk), and how a prompt is looked up there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import mlx.core as mx

from ..checkpoint.lazy_model import LazyModel
from ..engine.session import Session
from ..errors import BudgetError, called
from ..options import LoadOptions
from ..packages import modules
from .one_text import make_room
from .request import CachedPrefix, Recorder

GRID = 512
"""Tokens of a block, and at most of a chunk of a prompt."""

CAPTURED = 2
"""States that are held until a prompt is computed, beside the last ones."""


@dataclass(frozen=True)
class PrefixMatch:
    """What there is of a prompt.

    Attributes:
        cache: as after ``tokens`` of its tokens.
        logits: (1, vocabulary) of its last position, where that is all of them; else None.
    """

    tokens: int
    cache: list[Any]
    logits: mx.array | None = None


class PrefixCache(Protocol):
    """Prompts of one model, computed in one way. A package has the group ``prefix_cache`` with ``make(lazy, options)``,
    which returns one."""

    def salt(self, secret: str) -> None:
        """From now on prompts are kept and found under names that only who knows the secret comes to: whoever does not
        finds nothing of them, and sees by no answer's time what was asked."""

    def find(self, tokens: Sequence[int], step: int = GRID, *, whole: bool = True) -> PrefixMatch | None:
        """The longest prefix of a prompt that was kept; None: there is none.

        Args:
            step: tokens of a chunk, of which some are a block.
            whole: all of it will do, with its logits.
        """

    def recording(self, tokens: Sequence[int], step: int = GRID, held: int = 0, shared: int = 0) -> Recorder:
        """What notes a prompt while it is computed, of which so many tokens were found; with the first ``shared`` of
        them other texts begin too."""

    def like(self, cache: Sequence[Any]) -> bool:
        """Whether somebody's caches are those that prompts are kept of: of the same kinds, with the same bounds."""

    def keep(self, tokens: Sequence[int], cache: Sequence[Any], instead: str | None = None) -> str | None:
        """Keep a conversation's caches that hold these tokens, however those were computed; the name under which they
        are, if they are. ``instead``: of this one, which is removed."""

    def kept(self, tokens: Sequence[int], cache: list[Any]) -> str | None:
        """Have new caches hold these tokens, if such were kept; the name under which they are."""


def prefix_cache(lazy: LazyModel, o: LoadOptions) -> tuple[PrefixCache | None, tuple[str, ...]]:
    """A model's prefix cache, if it was asked for; and why there is none. There can be none where blocks end within
    chunks of prompts."""
    if o.prefix_cache == "off":
        return None, ()
    told = f"{called('prefix_cache')}: prompts are not kept, since"
    if GRID % (o.prefill_step_size or GRID):
        return None, (f"{told} chunks of {o.prefill_step_size} tokens do not end where blocks of {GRID} do",)
    for package in modules("prefix_cache").values():
        return cast(PrefixCache, package.make(lazy, o)), ()
    return None, (f"{told} outcore_prefix is not installed",)


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
) -> tuple[PrefixMatch | None, CachedPrefix]:
    """What was kept of a prompt, with the caches that it is in; and what goes with them.

    Args:
        step: tokens of a chunk. Where a block ends within one, nothing is found or kept.
        whole: all of it will do.
        shared: its first tokens, with which others' texts begin too.
    """
    prefix = session.prefix
    if prefix is None or GRID % step or session.plan.kv_slot:
        return None, CachedPrefix()
    found = prefix.find(tokens, step, whole=whole)
    if found is None:
        return None, CachedPrefix(recording=prefix.recording(tokens, step, shared=shared))
    recording = prefix.recording(tokens, step, found.tokens, shared) if found.logits is None else None
    session.metrics.prompt_found += found.tokens
    return found, CachedPrefix(found.tokens, found.logits, recording)


def unkept(session: Session, known: CachedPrefix, tokens: int) -> CachedPrefix:
    """The same of a prompt of so many tokens, of which nothing is kept, as there is no memory for it; it is told."""
    if known.recording is None:
        return known
    session.note(f"prefix cache: a prompt of {tokens} tokens is not kept, as memory is too small for that")
    return replace(known, recording=None)


def captured_bytes(session: Session, tokens: int) -> int:
    """Bytes of states that are held while so many tokens of a prompt are computed, to be kept."""
    return (
        CAPTURED * session.size.states
        if session.prefix is not None and not session.plan.kv_slot and tokens > GRID
        else 0
    )


def room_to_record(session: Session, tokens: int, prompt: int, step: int | None, kept: int) -> tuple[int, bool]:
    """Room for a context as ``make_room`` makes it, and for what is held of its prompt until it is kept, if there can
    be. Returns tokens of the prompt to compute at a time, and whether it can be kept."""
    captured = captured_bytes(session, prompt)
    try:
        return make_room(session, tokens, prompt, step, kept + captured), True
    except BudgetError:
        if not captured:
            raise
    return make_room(session, tokens, prompt, step, kept), False
