"""Proposes tokens by a multi-token-prediction head, from the model's last hidden states."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
from mlx_lm.generate import generation_stream

from outcore.decode.speculative.proposers import Draw, Guess

from .head import MtpHead, SharedParts
from .hidden_states import HiddenStates
from .layouts import Cache, leaves

MTP = "mtp"

# Tokens that the head computes at a time. Few, since the plan reserves no activations for the head; they fit into
# those of a chunk of the model.
STEP = 16


class MtpProposer:
    """Calls the head again and again: from the second guess on, its own state replaces the model's hidden state.

    The head's cache has the text's tokens from the first available hidden state on. Guessed tokens are trimmed from it
    when the text goes on.

    Args:
        head, shared: the head and the model's parts that it uses, in memory.
        draw: as in ``Drafting.proposer``.
        hidden: hidden states of the text's tokens, except the last.
    """

    name = MTP
    cheaper = None

    def __init__(self, head: MtpHead, shared: SharedParts, draw: Draw, hidden: HiddenStates) -> None:
        self._head: MtpHead | None = head
        self._shared, self._draw, self._hidden = shared, draw, hidden
        self._text: list[int] = []
        self._cache: Cache | None = None  # None until the head has followed some tokens
        self._followed = 0  # how many tokens' hidden states went into the head
        self._state: mx.array | None = None  # (1, 1, hidden): the head's state of the text's last token
        self._chain: list[mx.array] = []  # the head's states of the tokens guessed after the text

    def give_up(self) -> None:
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
        if self._state is None:
            return None
        with mx.stream(generation_stream):
            for token in drafted[len(self._chain) :]:
                self._chain.append(self._compute([token], self._chain[-1] if self._chain else self._state))
            logits = self._shared.logits(self._chain[-1] if self._chain else self._state)
            return self._draw(logits[0, -1])

    def _follow(self) -> None:
        """Feeds the text's new tokens to the head, each with the hidden state of the one before it."""
        if self._head is None or self._hidden.end == self._followed:
            return
        taken = self._hidden.take(self._followed)
        if taken is None:
            self._state = None
            return
        at, states = taken
        if at > self._followed or self._state is None or self._cache is None:
            # Some states are missing: begin a new cache from here.
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
