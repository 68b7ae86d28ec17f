"""What drafts for a loaded model: chosen by name, checked, made where it has to be, and paid for out of the budget."""

from __future__ import annotations

import difflib
import importlib
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

import mlx.nn as nn

from ...checkpoint.find_model import name_of, resolve_model
from ...checkpoint.lazy_model import LazyModel
from ...engine.model_profile import ModelProfile
from ...errors import CheckpointError, UsageError
from ...machine.small_files import CONFIG_BYTES, TOKENIZER_BYTES, parse_json, read_small
from ...plan.draft_cost import AUTO, MODEL, MTP, NGRAM, NONE, SELF, Draft
from ...plan.model_size import ModelSize
from ...plan.planner import resident_budget
from ...text import shortened
from ..passes import HiddenKeeper
from ..sampling import DrawForecast, MlxLmSampler
from .draft_length import DraftLengthPolicy
from .draft_model import HELD, CopySource, ModelSource, State
from .proposers import Both, NGram, Proposer
from .self_draft import BITS, DEFAULT_BITS, self_draft

WAYS = "give auto, none, ngram, self, self:BITS, mtp, mtp:FOLDER, or a model"

HEADS = "outcore_mtp.drafts"
"""The module of a package beside this one, as ``HeadDrafts``."""

LONGEST = 256
"""Drafted tokens that can be asked for at most: no text can be foreseen that far."""


def draft_of_itself(profile: ModelProfile, bits: int) -> Draft:
    """A low-bit copy of the model."""
    copy, size = self_draft(profile, bits), profile.size
    weights = copy.nbytes(False)
    return Draft(
        SELF,
        f"{SELF}:{bits}",
        bits=bits,
        weights=weights,
        head=copy.nbytes(True) - weights,
        cache=size.cache,
        growing=size.growing,
    )


class HeadDrafts(Protocol):
    """What a package brings that drafts with heads of a model: small layers which go on from its last hidden states."""

    def has_head(self, lazy: LazyModel) -> bool:
        """Whether there is a head for the model beside its weights."""

    def draft_by_head(self, profile: ModelProfile, source: Path | None = None) -> Draft | None:
        """The head as a way to draft, with its bytes; None: there is none. ``source``: the folder of its tensors."""

    def load_head(self, profile: ModelProfile, source: Path | None, cpu_streams: int) -> nn.Module:
        """The head, in memory."""

    def shared_with(self, model: nn.Module) -> Any:
        """What the head uses of a loaded model; its ``tap`` hears the model's last hidden states."""

    def hidden(self, shared: Any) -> HiddenKeeper:
        """What keeps a text's last hidden states for the head."""

    def proposer(
        self,
        head: nn.Module,
        shared: Any,
        name: str,
        how: DrawForecast | MlxLmSampler | None,
        vocabulary: int,
        hidden: HiddenKeeper,
    ) -> Droppable:
        """A source of guesses for one text; ``name``, ``how`` and ``vocabulary`` as in ``ModelSource``."""


def head_drafts() -> HeadDrafts | None:
    """The package beside this one that drafts with heads; None: it is not there."""
    try:
        return cast(HeadDrafts, importlib.import_module(HEADS))
    except ModuleNotFoundError as e:
        if e.name is None or not f"{HEADS}.".startswith(f"{e.name}."):
            raise
        return None


def draft_by_model(folder: Path, size: ModelSize) -> Draft:
    """Another model, of that size."""
    everything = resident_budget(size)
    return Draft(
        MODEL,
        name_of(folder),
        folder=folder,
        weights=everything - size.cache,
        # States are kept at some of the guesses to go back to.
        cache=size.cache + HELD * size.states,
        growing=size.growing,
    )


class Droppable(Proposer, Protocol):
    """A source of guesses whose memory may be needed."""

    def give_up(self) -> None:
        """Have no more guesses, and let go of the model."""


@dataclass
class Drafting:
    """What drafts for a loaded model: ``model``, in memory; None for the text's own repetitions alone. ``shared``: what
    a multi-token-prediction head shares with the model whose it is."""

    kind: str
    name: str
    model: nn.Module | None = None
    shared: Any = None
    _sources: weakref.WeakSet[Droppable] = field(default_factory=weakref.WeakSet, repr=False)

    def hidden(self) -> HiddenKeeper | None:
        """What keeps a text's hidden states for it; None where it does not draft from them."""
        return None if self.shared is None else cast(HeadDrafts, head_drafts()).hidden(self.shared)

    def source(
        self,
        control: DraftLengthPolicy,
        how: DrawForecast | MlxLmSampler | None,
        vocabulary: int,
        state: State,
        hidden: HiddenKeeper | None = None,
    ) -> Proposer:
        """A source of guesses for one text, of which the model holds ``state``, and somebody ``hidden``."""
        if self.model is None:
            return NGram()
        return Both(NGram(), self.by_model(how, vocabulary, state, hidden), control.experience.chance)

    def by_model(
        self, how: DrawForecast | MlxLmSampler | None, vocabulary: int, state: State, hidden: HiddenKeeper | None = None
    ) -> Proposer:
        """The model's guesses without the text's repetitions."""
        assert self.model is not None
        source: Droppable
        if self.shared is not None:
            heads = head_drafts()
            assert heads is not None and hidden is not None
            source = heads.proposer(self.model, self.shared, self.kind, how, vocabulary, hidden)
        elif self.kind == SELF:
            source = CopySource(self.model, self.kind, how, vocabulary, state)
        else:
            source = ModelSource(self.model, self.kind, how, vocabulary)
        self._sources.add(source)
        return source

    def give_up(self) -> None:
        """Let go of the model, also of texts under way: they have no more guesses of it."""
        self.model = self.shared = None
        for source in list(self._sources):
            source.give_up()


def parse_draft(draft: str) -> tuple[str, int | str | None]:
    """The kind of a ``--draft``, with the bits of a copy of the model itself, or the name of the drafting model, or of
    the one that has a multi-token-prediction head's tensors.

    Raises:
        UsageError: bits that there are no copies of, or a word that is none of the ways to draft.
    """
    if not isinstance(draft, str):
        raise UsageError(f"draft={shortened(repr(draft))}: {WAYS}")
    if draft in (AUTO, NONE, NGRAM):
        return draft, None
    if draft == SELF or draft.startswith(f"{SELF}:"):
        bits = draft.partition(":")[2] or str(DEFAULT_BITS)
        if bits not in map(str, BITS):
            raise UsageError(f"--draft {shortened(draft)}: give the number of bits, one of {', '.join(map(str, BITS))}")
        return SELF, int(bits)
    if draft == MTP or draft.startswith(f"{MTP}:"):
        if draft == f"{MTP}:":
            raise UsageError(f"--draft {draft}: give the original model, whose head it is, or leave the colon out")
        return MTP, draft.partition(":")[2] or None
    if not draft.strip():
        raise UsageError(f"--draft {draft!r}: {WAYS}")
    meant = difflib.get_close_matches(draft.lower(), (AUTO, NONE, NGRAM, SELF, MTP), 1)
    if meant and not Path(draft).exists():
        raise UsageError(f"--draft {shortened(draft)}: no folder, and not {meant[0]}, which may be meant; {WAYS}")
    return MODEL, draft


def draft_folder(model: str) -> Path:
    """The folder of a model that drafts, or has a head for it; where there is none, the flag that named it is told.

    Raises:
        UsageError, CheckpointError: as ``resolve_model``.
    """
    try:
        return resolve_model(model)
    except CheckpointError as e:
        raise type(e)(f"--draft: {e}") from e


def check_draft_length(most: int, name: str = "num_draft_tokens") -> int:
    """The number of drafted tokens that was asked for.

    Raises:
        UsageError: fewer than 1, or more than anything could be good for.
    """
    if isinstance(most, bool) or not isinstance(most, int) or not 1 <= most <= LONGEST:
        raise UsageError(f"{name} {shortened(most)}: from 1 to {LONGEST}; to draft nothing, load with draft none")
    return most


def check_tokenizers(model: Path, draft: Path) -> None:
    """Whether two models' tokens mean the same.

    Raises:
        UsageError: they do not.
    """
    ours, theirs = _tokens(model), _tokens(draft)
    if ours != theirs:
        raise UsageError(
            f"--draft {draft}: has another tokenizer than {model}; a model drafts only for one with the same tokens"
        )


def _tokens(folder: Path) -> Any:
    """What tells a folder's tokens apart: the vocabulary, or as much of it as is there."""
    path = folder / "tokenizer.json"
    try:
        if path.exists():
            found = parse_json(read_small(path, TOKENIZER_BYTES))
            added = {t["content"]: t["id"] for t in found.get("added_tokens", [])}
            return found["model"]["vocab"], added
        for name in ("tokenizer.model", "tiktoken.model", "vocab.json"):
            if (folder / name).exists():
                return read_small(folder / name, TOKENIZER_BYTES)
        config = parse_json(read_small(folder / "config.json", CONFIG_BYTES))
        return config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise CheckpointError(f"{path}: cannot be read to compare tokenizers: {' '.join(str(e).split())[:200]}") from e
