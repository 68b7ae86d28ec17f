"""Kinds of drafts beside n-grams, which packages bring: the seam to ``outcore_drafts``.

A package's module of the group ``drafts`` (``outcore.packages``) has ``SOURCES``, a ``DraftSource`` for each kind. One
class says all of a kind: what ``--draft`` takes, what it weighs in a plan, and how it is loaded; it gives a
``Drafting`` whose proposers guess. Verifying, how much is drafted, and what is learnt of it are the same for all.
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
from ...plan.draft_cost import AUTO, NGRAM, NONE, Draft
from ...plan.plan import Plan
from ...text import shortened
from ..opening import Opening
from .drafting import Drafting

OWN = (AUTO, NONE, NGRAM)
"""What the core knows by itself."""

MISSING = "needs the package outcore_drafts, which is not there; install outcore whole, or draft ngram"


class DraftSource:
    """A kind of draft that has weights.

    Attributes:
        kind: its word for ``--draft``, behind which something may follow a colon.
        usage: how the word is to be written, for people.
        names_models: it takes what is no kind's word, as the name of a model.
        over_ranks: it drafts for a model that lies on several machines.
    """

    kind: str
    usage: str
    names_models = False
    over_ranks = True

    def parse(self, asked: str, argument: str | None) -> Any:
        """What of this kind was asked for, as ``open`` takes it.

        Args:
            asked: all of ``--draft``; ``argument``: what follows the colon, None where there is none.

        Raises:
            UsageError: nothing can be meant by it.
        """
        if argument is not None:
            raise UsageError(f"{called('draft')} {shortened(asked)}: {self.kind} takes nothing behind a colon")
        return None

    def offers(self, profile: ModelProfile) -> Iterator[tuple[str, Any, int]]:
        """What ``--draft auto`` weighs for a model: names, what ``open`` takes for them, and bytes that they take at
        least."""
        return iter(())

    def open(self, which: Any, profile: ModelProfile, opening: Opening) -> tuple[ModelProfile, Draft]:
        """The model as it is with the draft, and the draft, sized; nothing has been read.

        Raises:
            UsageError, CheckpointError: it cannot draft for this model, or not as that is to be loaded.
        """
        raise NotImplementedError

    def to_write(self, profile: ModelProfile, plan: Plan, draft: Draft) -> tuple[int, Path | None]:
        """Bytes that are written before it drafts, once, and the folder that they are written to."""
        return 0, None

    def write(self, profile: ModelProfile, draft: Draft, progress: Progress) -> None:
        """Write its files before it is loaded, as ``outcore pack`` does."""
        raise NotImplementedError

    def load(self, draft: Draft, profile: ModelProfile, opening: Opening, progress: Progress) -> Drafting:
        """What drafts, before the model is loaded, whose ``join`` follows: with weights that are to be read before."""
        raise NotImplementedError

    def of_model(self, model: nn.Module) -> Drafting:
        """What drafts with a model that a caller has loaded; of a source that ``names_models``."""
        raise NotImplementedError


def draft_sources() -> dict[str, DraftSource]:
    """The kinds that packages bring, by their words."""
    return {source.kind: source for module in packages.modules("drafts").values() for source in module.SOURCES}


def draft_source(kind: str) -> DraftSource:
    """One of them.

    Raises:
        UsageError: no package brings it.
    """
    sources = draft_sources()
    if kind not in sources:
        raise UsageError(f"{called('draft')} {shortened(kind)}: {_ways() if sources else MISSING}")
    return sources[kind]


def for_models(asked: str) -> DraftSource:
    """What drafts with other models, as was ``asked``. Raises as ``draft_source``."""
    found = next((source for source in draft_sources().values() if source.names_models), None)
    if found is None:
        raise UsageError(f"{asked}: {MISSING}")
    return found


def parse_draft(draft: str) -> tuple[str, Any]:
    """The kind of a ``--draft``, and what of it, as its source takes it.

    Raises:
        UsageError: nothing can be meant by it, or the package that drafts so is not there.
    """
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
        raise UsageError(f"{asked}: no folder, and not {meant[0]}, which may be meant; {_ways()}")
    by_name = for_models(asked)
    return by_name.kind, by_name.parse(draft, draft)


def _ways() -> str:
    """What ``--draft`` takes."""
    return f"give {', '.join((*OWN, *(source.usage for source in draft_sources().values())))}"


def with_draft(kind: str, which: Any, profile: ModelProfile, opening: Opening) -> tuple[ModelProfile, Draft | None]:
    """The model, and what is to draft for it; of ``auto`` n-grams. Raises as ``DraftSource.open``."""
    if kind == NONE:
        return profile, None
    if kind in OWN:
        return profile, Draft(NGRAM, NGRAM)
    return draft_source(kind).open(which, profile, opening)
