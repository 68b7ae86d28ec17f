"""What drafting for a model has shown on this machine: kept in the cache folder for the next plan, by the model's
identity, beside calibrations. Counts and seconds, nothing of the texts."""

from __future__ import annotations

import contextlib
import json
import weakref
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from ..decode.speculative.acceptance import AcceptanceStats
from ..engine.session import Session
from ..errors import StoreError
from ..machine.cache_folder import cache_dir, keep_document, require_own
from ..machine.device import device_kind
from ..machine.small_files import read_small
from ..plan.draft_choice import Choice, SeenDrafts, chance_of
from ..plan.draft_cost import NGRAM, Draft

SCHEMA = 1
FOLDER = "drafts-seen"
FILE_BYTES = 100_000
LEAST, MOST = 32, 4096
"""Guesses, or sweeps, that say enough, and those that what was seen before counts for at most."""

MOST_A_SWEEP = 257
"""Tokens that come of a sweep at most: of the longest draft that can be asked for."""


@dataclass(frozen=True)
class Counts:
    """Of one way to draft.

    Attributes:
        sweeps: after prompts; ``tokens``: that they made.
        guesses, wrong: guesses that were looked at, and those that were not right.
        guess_s: seconds of one, of late; None: not known.
    """

    sweeps: float = 0.0
    tokens: float = 0.0
    guesses: float = 0.0
    wrong: float = 0.0
    guess_s: float | None = None

    def seen(self) -> SeenDrafts:
        return SeenDrafts(
            tokens=max(1.0, self.tokens / self.sweeps) if self.sweeps >= LEAST else None,
            chance=1 - min(1.0, self.wrong / self.guesses) if self.guesses >= LEAST else None,
            guess_s=self.guess_s,
        )

    def plus(self, other: Counts) -> Counts:
        """Those of before, fading, and these."""
        sweeps, guesses = (min(1.0, MOST / n) if n else 0.0 for n in (self.sweeps, self.guesses))
        return Counts(
            self.sweeps * sweeps + other.sweeps,
            self.tokens * sweeps + other.tokens,
            self.guesses * guesses + other.guesses,
            self.wrong * guesses + other.wrong,
            self.guess_s if other.guess_s is None else other.guess_s,
        )


_COUNTS = TypeAdapter(dict[str, Counts])


def file_of(identity: str) -> Path:
    """Where a model's is kept."""
    return cache_dir() / FOLDER / f"{identity[:16]}.json"


def key_of(name: str, dtype: str | None) -> str:
    """A way to draft, by what its seconds depend on too."""
    return f"{name} {device_kind()} {dtype or 'own'}"


def known_drafts(identity: str) -> Mapping[str, Counts]:
    """What was kept for a model, by ``key_of``; nothing where there is nothing, or what is there cannot be used."""
    path = file_of(identity)
    try:
        require_own(path.parent)
        found = json.loads(read_small(path, FILE_BYTES))
        if found["schema"] != SCHEMA or found["identity"] != identity:
            return {}
        counts = _COUNTS.validate_python(found["drafts"])
    except (OSError, StoreError, ValueError, KeyError, TypeError, RecursionError, ValidationError):
        return {}
    return {key: c for key, c in counts.items() if _possible(c)}


def _possible(counts: Counts) -> bool:
    numbers = [counts.sweeps, counts.tokens, counts.guesses, counts.wrong, counts.guess_s or 0.0]
    most = counts.sweeps * MOST_A_SWEEP
    believable = counts.wrong <= counts.guesses and counts.tokens <= most and counts.guess_s != 0.0
    return believable and all(0 <= n < 1e12 for n in numbers)


def seen_before(identity: str, name: str, dtype: str | None) -> SeenDrafts:
    """What was kept of a way to draft for a model; nothing where there is nothing."""
    counts = known_drafts(identity).get(key_of(name, dtype))
    return counts.seen() if counts is not None else SeenDrafts()


def begun(choice: Choice | None, draft: Draft, seen: SeenDrafts) -> AcceptanceStats:
    """What a model's first text begins with: what is expected of what drafts for it."""
    experience = AcceptanceStats()
    if choice is not None and choice.planned is not None:
        experience.expect(draft.kind, chance_of(draft, seen), choice.drafted)
    return experience


def keep_drafts(of: weakref.ref[Session], identity: str, draft: Draft, dtype: str | None) -> None:
    """When a session is closed: add what it has seen to what is kept. Nothing is said where that cannot be written."""
    session = of()
    learnt: AcceptanceStats | None = session.experience if session is not None else None
    if session is None or learnt is None or session.drafting is None or session.drafting.name != draft.name:
        return
    if not session.transport.chooses:
        return  # it was told what others guessed
    before = dict(known_drafts(identity))
    key = key_of(draft.name, dtype)
    before[key] = before.get(key, Counts()).plus(_counts(session, learnt, draft))
    document = {"schema": SCHEMA, "identity": identity, "drafts": {k: asdict(c) for k, c in before.items()}}
    with contextlib.suppress(OSError, StoreError):
        keep_document(file_of(identity), document)


def _counts(session: Session, learnt: AcceptanceStats, draft: Draft) -> Counts:
    source = NGRAM if draft.kind == NGRAM else draft.kind
    guesses, right = learnt.counts.get(source, (0, 0))
    seconds = learnt.guess.get(source)
    return Counts(learnt.sweeps, learnt.made, guesses, guesses - right, seconds.value if seconds is not None else None)
