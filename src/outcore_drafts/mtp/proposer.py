"""Guesses by a model's multi-token-prediction head: from its last hidden states, one head's layer for each guess."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
from mlx_lm.generate import generation_stream

from outcore.decode.speculative.proposers import Draw, Guess

from .head import MtpHead, SharedParts
from .hidden_states import HiddenStates
from .layouts import Cache, leaves

MTP = "mtp"

STEP = 16
"""Tokens that the head follows at a time: few, since a plan counts a chunk of the model's own activations, at least
as many, and none for what drafts."""


class MtpProposer:
    """The head, used again and again: its state of a guessed token takes the place of the model's own.

    Its keys and values are of the text's tokens, from the first one on whose hidden state is known. Those of guessed
    tokens go when the text goes on.

    Args:
        head, shared: in memory; ``shared`` with the model.
        draw: as in ``Drafting.proposer``.
        hidden: of the text's tokens, but for the last one.
    """

    name = MTP
    cheaper = None

    def __init__(self, head: MtpHead, shared: SharedParts, draw: Draw, hidden: HiddenStates) -> None:
        self._head: MtpHead | None = head
        self._shared, self._draw, self._hidden = shared, draw, hidden
        self._text: list[int] = []
        self._cache: Cache | None = None  # none where nothing was followed yet
        self._followed = 0  # the token behind the last one whose hidden state went into the head
        self._state: mx.array | None = None  # (1, 1, hidden) of the text's last token, by the head
        self._chain: list[mx.array] = []  # and of the tokens guessed since

    def give_up(self) -> None:
        """Have no more guesses, and let go of the head."""
        self._head = self._state = None
        self._chain, self._cache = [], None

    def begin(self, text: Sequence[int]) -> None:
        self._text = list(text)
        if self._cache is not None:
            self._cache.trim(len(self._chain))
        self._chain = []
        with mx.stream(generation_stream):
            self._follow()

    def guess(self, drafted: Sequence[int]) -> Guess | None:
        """What the head would say after the text and these tokens."""
        if self._state is None:
            return None
        with mx.stream(generation_stream):
            for token in drafted[len(self._chain) :]:
                self._chain.append(self._compute([token], self._chain[-1] if self._chain else self._state))
            logits = self._shared.logits(self._chain[-1] if self._chain else self._state)
            return self._draw(logits[0, -1])

    def _follow(self) -> None:
        """Compute the text's tokens that are new: each from the hidden state of the one before it."""
        if self._head is None or self._hidden.end == self._followed:
            return
        taken = self._hidden.take(self._followed)
        if taken is None:
            self._state = None
            return
        at, states = taken
        if at > self._followed or self._state is None or self._cache is None:
            # Some are not known, or none were: from here on, then.
            self._cache = self._head.make_cache()
        ids = self._text[len(self._text) - states.shape[1] :]
        for first in range(0, len(ids), STEP):
            out = self._compute(ids[first : first + STEP], states[:, first : first + STEP])
            mx.eval(out, [leaf.state for leaf in leaves(self._cache)])
            self._state = out[:, -1:]
        self._followed = at + len(ids)

    def _compute(self, ids: Sequence[int], states: mx.array) -> mx.array:
        assert self._head is not None
        embedded = self._shared.embedded(mx.array(list(ids), dtype=mx.int32))
        return self._head(embedded, states, self._cache)
