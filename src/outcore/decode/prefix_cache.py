"""The protocol of prefix caches (``outcore_prefix`` stores computed prompts on disk), and how prompts are looked up."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
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

# How many copies of a prompt's states are in memory until it is computed and stored, besides the final one.
CAPTURED = 2


@dataclass(frozen=True)
class PrefixMatch:
    """The longest stored prefix of a prompt.

    Attributes:
        tokens: its length.
        cache: caches that hold these tokens.
        logits: (1, vocabulary) after its last token if it is the whole prompt; otherwise None.
    """

    tokens: int
    cache: list[Any]
    logits: mx.array | None = None


class PrefixCache(Protocol):
    """Stored prompts of one model. A package's module of the group ``prefix_cache`` has ``make(lazy, options)``, which
    returns one."""

    def salt(self, secret: str) -> None:
        """Mixes a secret into the names of prompts from now on. A user without it finds none of these prompts, and
        cannot learn from response times which prompts others sent."""

    def find(self, tokens: Sequence[int], step: int = GRID, *, whole: bool = True) -> PrefixMatch | None:
        """Returns the longest stored prefix of a prompt, computed in chunks of ``step`` tokens; None: there is none.
        ``whole``: the prefix may be the whole prompt, with its logits."""

    def recording(self, tokens: Sequence[int], step: int = GRID, held: int = 0, shared: int = 0) -> Recorder:
        """Returns a recorder that stores a prompt while it is computed. The prompt's first ``held`` tokens are stored
        already; other prompts begin with its first ``shared`` tokens too."""

    def like(self, cache: Sequence[Any]) -> bool:
        """Whether a caller's caches are of the same kinds and bounds as the stored ones."""

    def keep(self, tokens: Sequence[int], cache: Sequence[Any], instead: str | None = None) -> str | None:
        """Stores a conversation's caches, which hold ``tokens``. Returns the name under which they are stored; None:
        they are not. ``instead``: name of the stored conversation that this one replaces."""

    def kept(self, tokens: Sequence[int], cache: list[Any]) -> str | None:
        """Fills new caches with ``tokens`` if a conversation with them is stored. Returns its name; None: none is."""


def prefix_cache(lazy: LazyModel, o: LoadOptions) -> tuple[PrefixCache | None, tuple[str, ...]]:
    """Returns a model's prefix cache; or None, and notes for the user that say why (none if it is switched off)."""
    if o.prefix_cache == "off":
        return None, ()
    note = f"{called('prefix_cache')}: prompts are not stored, since"
    if GRID % (o.prefill_step_size or GRID):
        return None, (f"{note} chunks of {o.prefill_step_size} tokens do not end where blocks of {GRID} do",)
    for package in modules("prefix_cache").values():
        return cast(PrefixCache, package.make(lazy, o)), ()
    return None, (f"{note} outcore_prefix is not installed",)


def block_step(step: int) -> int:
    """Returns the largest chunk length, in tokens, that is at most ``step`` and divides a block."""
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
    """Returns the stored prefix of a prompt (None: there is none), and ``Request.cached`` for it. If ``step`` does not
    divide a block, nothing is found or stored. ``shared``: as in ``PrefixCache.recording``; ``records``: memory
    suffices to store the prompt."""
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
    """Returns the bytes of states that are kept in memory while a prompt is computed, to be stored afterwards."""
    records = session.prefix is not None and not session.plan.kv_slot and tokens > GRID
    return CAPTURED * session.size.states if records else 0


def room_to_record(session: Session, tokens: int, prompt: int, step: int | None, kept: int) -> tuple[int, bool]:
    """Makes room as ``make_room`` does, and if possible also for storing the prompt in the prefix cache. Returns the
    prompt tokens to compute at a time, and whether the prompt can be stored."""
    if captured := captured_bytes(session, prompt):
        with suppress(BudgetError):
            return make_room(session, tokens, prompt, step, kept + captured, False), True
    return make_room(session, tokens, prompt, step, kept), not captured
