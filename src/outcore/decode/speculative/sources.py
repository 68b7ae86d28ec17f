"""The kinds of drafts that packages such as ``outcore_drafts`` add to n-grams.

A package's module of the group ``drafts`` (``outcore.packages``) has ``SOURCES``, one ``DraftSource`` for each kind. It
parses the argument of ``--draft``, gives the draft's sizes for the plan, and loads the draft as a ``Drafting``, whose
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
        kind: the word for ``--draft``; an argument may follow after a colon.
        usage: how ``--draft`` is written for this kind, for error messages.
        names_models: this kind takes a ``--draft`` that names no kind, as the name of a draft model.
        quantizes: takes the option ``draft_bits``.
    """

    kind: str
    usage: str
    names_models = False
    quantizes = False

    def takes(self, asked: str) -> bool:
        """Returns whether a ``--draft`` that names no kind names a folder or a model of the Hub that is of this kind.
        Others are draft models."""
        return False

    def parse(self, asked: str, argument: str | None) -> Any:
        """Returns the argument of ``--draft`` in the form that ``open`` takes.

        Args:
            asked: all of ``--draft``.
            argument: the part after the colon; None: there is no colon.

        Raises:
            UsageError: the argument is invalid.
        """
        if argument is not None:
            raise UsageError(f"{called('draft')} {shortened(asked)}: give {self.kind} alone, without a colon")
        return None

    def offers(self, profile: ModelProfile) -> Iterator[tuple[str, Any, int]]:
        """Returns the drafts that ``--draft auto`` considers, each as its name, its argument of ``open``, and the least
        budget in bytes."""
        return iter(())

    def open(self, which: Any, profile: ModelProfile, opening: Opening) -> tuple[ModelProfile, Draft]:
        """Returns the model's profile with the draft, and the draft's sizes, without reading weights.

        Raises:
            UsageError, CheckpointError: it cannot draft for this model, or not with these load options.
        """
        raise NotImplementedError

    def to_write(self, profile: ModelProfile, plan: Plan, draft: Draft) -> tuple[int, Path | None]:
        """Returns the bytes that have to be written once before the draft can be used, and the folder."""
        return 0, None

    def write(self, profile: ModelProfile, draft: Draft, progress: Progress) -> None:
        """Writes the draft's files without loading it, as ``outcore pack`` does."""
        raise NotImplementedError

    def load(self, draft: Draft, profile: ModelProfile, opening: Opening, progress: Progress) -> Drafting:
        """Loads the draft before the model is loaded; ``Drafting.join`` follows."""
        raise NotImplementedError

    def of_model(self, model: nn.Module) -> Drafting:
        """Returns a drafter with a model that the caller has loaded. Only for sources with ``names_models``."""
        raise NotImplementedError


def draft_sources() -> dict[str, DraftSource]:
    """Returns the kinds of drafts that packages add, by their words for ``--draft``."""
    return {source.kind: source for module in packages.modules("drafts").values() for source in module.SOURCES}


def draft_source(kind: str) -> DraftSource:
    """Returns the source of a kind of draft. Raises ``UsageError`` if no package has it."""
    sources = draft_sources()
    if kind not in sources:
        raise UsageError(f"{called('draft')} {shortened(kind)}: {_ways() if sources else MISSING}")
    return sources[kind]


def for_models(asked: str) -> DraftSource:
    """Returns the source that drafts with other models. Raises ``UsageError``, which names ``asked``, if no package
    has one."""
    found = next((source for source in draft_sources().values() if source.names_models), None)
    if found is None:
        raise UsageError(f"{asked}: {MISSING}")
    return found


def parse_draft(draft: str) -> tuple[str, Any]:
    """Returns the kind and the argument of a ``--draft``. Raises ``UsageError`` if that is invalid, or its package is
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
    if meant and "/" not in draft and not Path(draft).exists():
        raise UsageError(f"{asked}: no such folder; did you mean {meant[0]}? {_ways()}")
    by_name = next((source for source in sources.values() if source.takes(draft)), None) or for_models(asked)
    return by_name.kind, by_name.parse(draft, draft)


def _ways() -> str:
    return f"give {', '.join((*OWN, *(source.usage for source in draft_sources().values())))}"


def with_draft(kind: str, which: Any, profile: ModelProfile, opening: Opening) -> tuple[ModelProfile, Draft | None]:
    """Returns the profile with its draft, and the draft; n-grams for ``auto``. Raises as ``DraftSource.open``."""
    source = None if kind in OWN else draft_source(kind)
    if kind != AUTO and not (source is not None and source.quantizes) and opening.options.draft_bits is not None:
        raise UsageError(
            f"{called('draft_bits')}: only for a published drafter, as {called('draft')} FOLDER names one; leave it out"
        )
    if kind == NONE:
        return profile, None
    return (profile, Draft(NGRAM, NGRAM)) if source is None else source.open(which, profile, opening)
