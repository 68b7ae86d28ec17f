"""What drafts for a loaded model, of which each text has guesses of its own."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from ...engine.model_profile import ModelProfile
from ...engine.session import Session
from ...errors import UsageError
from ...plan.draft_cost import NGRAM
from ...text import shortened
from ..passes import HiddenKeeper
from ..sampling import MlxLmSampler
from .draft_length import DraftLengthPolicy
from .proposers import Both, Draw, NGram, Proposer, drawn

LONGEST = 256
"""Drafted tokens that can be asked for at most: no text can be foreseen that far."""

TextState = Callable[[], tuple[list[Any], list[int]]]
"""Gives the model's caches of a text, and what they do not hold yet of it, but for its last token."""


class DroppableProposer(Proposer, Protocol):
    """A proposer whose memory may be needed."""

    def give_up(self) -> None:
        """Have no more guesses, and let go of the weights."""


class Drafting:
    """What drafts for a loaded model. Of this class itself: the text's own repetitions, without any weights. Kinds that
    need some are classes made of it, in packages (``sources``).

    Attributes:
        model: that drafts, in memory; None: nothing has weights.
        kind, name, holds_head, intact: as of ``engine.resident_layers.Drafter``, which this is.
    """

    kind = NGRAM
    holds_head = False

    def __init__(self, name: str = NGRAM) -> None:
        self.name = name
        self.model: Any = None
        self._proposers: weakref.WeakSet[DroppableProposer] = weakref.WeakSet()

    def join(self, session: Session) -> Drafting:
        """The model is loaded. Returns what drafts for it: this, or n-grams where this cannot, which is noted."""
        return self

    @property
    def intact(self) -> bool:
        """Whether it can be given up without harm."""
        return True

    def hidden(self) -> HiddenKeeper | None:
        """What keeps a text's hidden states for its proposer; None where it does not draft from them. Of which layers
        they are is between the two."""
        return None

    def proposer(self, draw: Draw, state: TextState, hidden: HiddenKeeper | None) -> DroppableProposer | None:
        """What guesses one text's tokens by weights; None: nothing does.

        Args:
            draw: makes a guess of logits.
            state: of the text, in the model. ``hidden``: this text's, of ``hidden()``.
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
        """What guesses one text's tokens: its own repetitions, and what has weights beside them.

        Args:
            how: as in ``proposers.drawn``. ``vocabulary``: tokens that there are.
        """
        model = self.proposer(partial(drawn, how=how, vocabulary=vocabulary, name=self.kind), state, hidden)
        if model is None:
            return NGram()
        self._proposers.add(model)
        return Both(NGram(), model, control.acceptance.chance)

    def profile_without(self, profile: ModelProfile) -> ModelProfile:
        """As of ``Drafter``."""
        return profile

    def give_up(self, session: Session) -> Drafting:
        """Let go of what it has in memory, also of texts under way: they have no more guesses of it. Returns n-grams,
        which draft instead."""
        for proposer in list(self._proposers):
            proposer.give_up()
        self.close()
        return Drafting()

    def close(self) -> None:
        """Let go of the weights."""
        self.model = None


def check_draft_length(most: int, name: str = "num_draft_tokens") -> int:
    """The number of drafted tokens that was asked for.

    Raises:
        UsageError: fewer than 1, or more than anything could be good for.
    """
    if isinstance(most, bool) or not isinstance(most, int) or not 1 <= most <= LONGEST:
        raise UsageError(f"{name} {shortened(most)}: from 1 to {LONGEST}; to draft nothing, load with draft none")
    return most
