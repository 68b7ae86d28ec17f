"""The seam to what stores computed prompts (``outcore_prefix``, on disk), and how a prompt is looked up there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import mlx.core as mx

from ..checkpoint.lazy_model import LazyModel
from ..engine.session import Session
from ..errors import BudgetError, called
from ..options import LoadOptions
from ..packages import modules
from .one_text import make_room
from .request import CachedPrefix, Recorder

# Tokens of a block, and the most tokens of a chunk of a prompt.
GRID = 512

# States that are held in memory until a prompt is computed, in addition to the final ones.
CAPTURED = 2


@dataclass(frozen=True)
class PrefixMatch:
    """The longest stored prefix of a prompt.

    Attributes:
        tokens: its length.
        cache: caches that hold these tokens.
        logits: (1, vocabulary) of its last position, where it is the whole prompt; else None.
    """

    tokens: int
    cache: list[Any]
    logits: mx.array | None = None


class PrefixCache(Protocol):
    """Stored prompts of one model. A package's module of the group ``prefix_cache`` has ``make(lazy, options)``, which
    returns one."""

    def salt(self, secret: str) -> None:
        """Mixes a secret into all names from now on: a user without it finds none of the prompts, and cannot learn from
        response times which were asked."""

    def find(self, tokens: Sequence[int], step: int = GRID, *, whole: bool = True) -> PrefixMatch | None:
        """The longest stored prefix of a prompt, computed in chunks of ``step`` tokens; ``whole``: all of it may match,
        with its logits."""

    def recording(self, tokens: Sequence[int], step: int = GRID, held: int = 0, shared: int = 0) -> Recorder:
        """A recorder that stores a prompt while it is computed. Its first ``held`` tokens are stored already; other
        prompts begin with its first ``shared`` tokens too."""

    def like(self, cache: Sequence[Any]) -> bool:
        """Whether a caller's caches are of the same kinds and bounds as the stored ones."""

    def keep(self, tokens: Sequence[int], cache: Sequence[Any], instead: str | None = None) -> str | None:
        """Store a conversation's caches, which hold these tokens, however those were computed. Returns the name, None
        if not stored. ``instead``: the stored conversation that this replaces."""

    def kept(self, tokens: Sequence[int], cache: list[Any]) -> str | None:
        """Fill new caches with these tokens, if such a conversation is stored; returns its name."""


def prefix_cache(lazy: LazyModel, o: LoadOptions) -> tuple[PrefixCache | None, tuple[str, ...]]:
    """A model's prefix cache, if asked for, and notes that say why there is none: chunks must end where blocks do."""
    if o.prefix_cache == "off":
        return None, ()
    note = f"{called('prefix_cache')}: prompts are not stored, since"
    if GRID % (o.prefill_step_size or GRID):
        return None, (f"{note} chunks of {o.prefill_step_size} tokens do not end where blocks of {GRID} do",)
    for package in modules("prefix_cache").values():
        return cast(PrefixCache, package.make(lazy, o)), ()
    return None, (f"{note} outcore_prefix is not installed",)


def block_step(step: int) -> int:
    """The largest chunk length, in tokens, that is at most ``step`` and divides a block."""
    return next(tokens for tokens in range(min(step, GRID), 0, -1) if GRID % tokens == 0)


def look_up(
    session: Session,
    tokens: Sequence[int],
    step: int,
    *,
    whole: bool = True,
    shared: int = 0,
    records: bool = True,
) -> tuple[PrefixMatch | None, CachedPrefix]:
    """The stored prefix of a prompt, and how a request begins with it. Where chunks of ``step`` tokens do not end with
    blocks, nothing is found or stored; ``shared`` as of ``PrefixCache.recording``; ``records``: there is memory to
    store it."""
    prefix = session.prefix
    if prefix is None or GRID % step or session.plan.kv_slot:
        return None, CachedPrefix()
    found, recording = prefix.find(tokens, step, whole=whole), None
    held, logits = (0, None) if found is None else (found.tokens, found.logits)
    if logits is None and records:
        recording = prefix.recording(tokens, step, held, shared)
    elif logits is None:
        session.note(f"prefix cache: a prompt of {len(tokens)} tokens is not stored: memory is too small for that")
    session.metrics.prompt_found += held
    return found, CachedPrefix(held, logits, recording)


def captured_bytes(session: Session, tokens: int) -> int:
    """Bytes of states that are held while a prompt of so many tokens is computed, to be stored then."""
    records = session.prefix is not None and not session.plan.kv_slot and tokens > GRID
    return CAPTURED * session.size.states if records else 0


def room_to_record(session: Session, tokens: int, prompt: int, step: int | None, kept: int) -> tuple[int, bool]:
    """Makes room as ``make_room`` does, and for what is held of a prompt until it is stored, if it fits. Returns the
    prompt tokens to compute at a time, and whether the prompt can be stored."""
    captured = captured_bytes(session, prompt)
    try:
        return make_room(session, tokens, prompt, step, kept + captured), True
    except BudgetError:
        if not captured:
            raise
    return make_room(session, tokens, prompt, step, kept), False
