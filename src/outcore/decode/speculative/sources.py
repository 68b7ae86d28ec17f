"""The kinds of drafts that packages add to n-grams: the seam to ``outcore_drafts``.

A package's module of the group ``drafts`` (``outcore.packages``) has ``SOURCES``, one ``DraftSource`` for each kind:
the words that ``--draft`` takes, the draft's sizes for the plan, and how it is loaded, as a ``Drafting`` whose
proposers guess. Verification, draft length and statistics are the same for all kinds.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.nn as nn

from ... import packages
from ...engine.binding import Progress
from ...engine.model_profile import ModelProfile
from ...errors import UsageError, called
from ...plan.joint_plan import AUTO, NGRAM, NONE, Draft
from ...plan.plan import Plan
from ...text import shortened
from ..opening import Opening
from .drafting import Drafting

# The kinds that the core has itself.
OWN = (AUTO, NONE, NGRAM)

MISSING = "needs the package outcore_drafts, which is missing; install outcore again, or draft ngram"


class DraftSource:
    """A kind of draft that has weights.

    Attributes:
        kind: its word for ``--draft``; an argument may follow after a colon.
        usage: how the word is written, for people.
        names_models: a word that names no kind is taken as the name of its model.
        over_ranks: it drafts for a model that lies on several machines.
    """

    kind: str
    usage: str
    names_models = False
    over_ranks = True

    def parse(self, asked: str, argument: str | None) -> Any:
        """The argument of ``--draft`` as ``open`` takes it.

        Args:
            asked: all of ``--draft``.
            argument: the part after the colon, None if there is none.

        Raises:
            UsageError: it means nothing.
        """
        if argument is not None:
            raise UsageError(f"{called('draft')} {shortened(asked)}: give {self.kind} alone, without a colon")
        return None

    def offers(self, profile: ModelProfile) -> Iterator[tuple[str, Any, int]]:
        """The drafts that ``--draft auto`` considers: names, arguments of ``open``, and the least bytes that they
        take."""
        return iter(())

    def open(self, which: Any, profile: ModelProfile, opening: Opening) -> tuple[ModelProfile, Draft]:
        """The model with the draft, and the draft's sizes; reads no weights.

        Raises:
            UsageError, CheckpointError: it cannot draft for this model, or not as that is to be loaded.
        """
        raise NotImplementedError

    def to_write(self, profile: ModelProfile, plan: Plan, draft: Draft) -> tuple[int, Path | None]:
        """Bytes that are written once before it drafts, and the folder."""
        return 0, None

    def write(self, profile: ModelProfile, draft: Draft, progress: Progress) -> None:
        """Write its files without loading it, as ``outcore pack`` does."""
        raise NotImplementedError

    def load(self, draft: Draft, profile: ModelProfile, opening: Opening, progress: Progress) -> Drafting:
        """Loads the draft before the model is loaded; ``Drafting.join`` follows."""
        raise NotImplementedError

    def of_model(self, model: nn.Module) -> Drafting:
        """The drafter of a model that the caller has loaded; of a source that ``names_models``."""
        raise NotImplementedError


def draft_sources() -> dict[str, DraftSource]:
    """The kinds that packages add, by their words."""
    return {source.kind: source for module in packages.modules("drafts").values() for source in module.SOURCES}


def draft_source(kind: str) -> DraftSource:
    """The source of this kind. Raises ``UsageError`` if no package has it."""
    sources = draft_sources()
    if kind not in sources:
        raise UsageError(f"{called('draft')} {shortened(kind)}: {_ways() if sources else MISSING}")
    return sources[kind]


def for_models(asked: str) -> DraftSource:
    """The source that drafts with other models; ``asked`` is named in its errors, which are those of
    ``draft_source``."""
    found = next((source for source in draft_sources().values() if source.names_models), None)
    if found is None:
        raise UsageError(f"{asked}: {MISSING}")
    return found


def parse_draft(draft: str) -> tuple[str, Any]:
    """The kind and the argument of a ``--draft``. Raises ``UsageError`` if it means nothing, or its package is
    missing."""
    if not isinstance(draft, str):
        raise UsageError(f"draft={shortened(repr(draft))}: {_ways()}")
    if draft in OWN:
        return draft, None
    asked = f"{called('draft')} {shortened(draft)}"
    word, colon, argument = draft.partition(":")
    sources = draft_sources()
    if not sources:
        raise UsageError(f"{asked}: {MISSING}")
    if word in sources and not sources[word].names_models:
        return word, sources[word].parse(draft, argument if colon else None)
    if not draft.strip():
        raise UsageError(f"{called('draft')} {draft!r}: {_ways()}")
    words = (*OWN, *(kind for kind, source in sources.items() if not source.names_models))
    meant = difflib.get_close_matches(draft.lower(), words, 1)
    if meant and not Path(draft).exists():
        raise UsageError(f"{asked}: no such folder; did you mean {meant[0]}? {_ways()}")
    by_name = for_models(asked)
    return by_name.kind, by_name.parse(draft, draft)


def _ways() -> str:
    return f"give {', '.join((*OWN, *(source.usage for source in draft_sources().values())))}"


def with_draft(kind: str, which: Any, profile: ModelProfile, opening: Opening) -> tuple[ModelProfile, Draft | None]:
    """The model and its draft; ``auto`` begins with n-grams. Raises as ``DraftSource.open``."""
    if kind == NONE:
        return profile, None
    if kind in OWN:
        return profile, Draft(NGRAM, NGRAM)
    return draft_source(kind).open(which, profile, opening)
