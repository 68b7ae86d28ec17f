"""The drafter of a loaded model, which makes a proposer for each text."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from ...engine.model_profile import ModelProfile
from ...engine.session import Session
from ...errors import UsageError
from ...plan.joint_plan import NGRAM
from ...text import shortened
from ..passes import HiddenKeeper
from ..sampling import MlxLmSampler
from .draft_length import DraftLengthPolicy
from .proposers import Both, Draw, NGram, Proposer, drawn

# The most drafted tokens that can be asked for; no text can be predicted that far.
LONGEST = 256

# Returns the model's caches of a text, and its tokens that they do not hold yet, without the last one.
TextState = Callable[[], tuple[list[Any], list[int]]]


class DroppableProposer(Proposer, Protocol):
    """A proposer whose memory can be freed while its text goes on."""

    def give_up(self) -> None: ...


class Drafting:
    """The drafter of a loaded model. This class drafts n-grams, without weights; subclasses in packages (``sources``)
    draft with weights.

    Attributes:
        model: the model in memory that drafts; None: the drafter has no weights.
        kind, name, holds_head, intact: as in the protocol ``engine.resident_layers.Drafter``.
    """

    kind = NGRAM
    holds_head = False

    def __init__(self, name: str = NGRAM) -> None:
        self.name = name
        self.model: Any = None
        self._proposers: weakref.WeakSet[DroppableProposer] = weakref.WeakSet()

    def join(self, session: Session) -> Drafting:
        """Called when the model is loaded. Returns the drafter to use: this one, or n-grams, with a note to the user,
        if this one cannot draft."""
        return self

    @property
    def intact(self) -> bool:
        """Whether the drafter can be given up safely."""
        return True

    def new_text(self, session: Session, most: int) -> None:
        """Called before a text begins, while memory may be moved: a drafter that was given up may come back for it,
        with room for ``most`` drafted tokens."""

    def hidden(self) -> HiddenKeeper | None:
        """Returns a new keeper of a text's hidden states for its proposer; None: the proposer uses none."""
        return None

    def proposer(self, draw: Draw, state: TextState, hidden: HiddenKeeper | None) -> DroppableProposer | None:
        """Returns a proposer that guesses one text's tokens by weights; None: this drafter has no weights.

        Args:
            draw: makes a guess from logits.
            state: returns the text's caches in the model.
            hidden: what ``hidden()`` returned for this text.
        """
        return None

    def source(
        self,
        control: DraftLengthPolicy,
        how: MlxLmSampler | None,
        vocabulary: int,
        state: TextState,
        hidden: HiddenKeeper | None = None,
    ) -> Proposer:
        """Returns a proposer of one text's tokens, from n-grams and from weights, if there are any; ``how`` and
        ``vocabulary``: as in ``proposers.drawn``."""
        model = self.proposer(partial(drawn, how=how, vocabulary=vocabulary, name=self.kind), state, hidden)
        if model is None:
            return NGram()
        self._proposers.add(model)
        return Both(NGram(), model, control.acceptance.chance)

    def profile_without(self, profile: ModelProfile) -> ModelProfile:
        return profile

    def give_up(self, session: Session) -> Drafting:
        """Frees the weights, so that running texts get no more guesses from them. Returns a drafter of n-grams to use
        instead."""
        for proposer in list(self._proposers):
            proposer.give_up()
        self.close()
        return Drafting()

    def close(self) -> None:
        self.model = None


def check_draft_length(most: int, name: str = "num_draft_tokens") -> int:
    """Returns ``most``, a number of drafted tokens. Raises ``UsageError`` below 1 or above ``LONGEST``."""
    if isinstance(most, bool) or not isinstance(most, int) or not 1 <= most <= LONGEST:
        raise UsageError(f"{name} {shortened(most)}: give 1 to {LONGEST}; to turn drafting off, load with draft none")
    return most
