"""Proposes tokens by a published drafter, from the states of the model's layers."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
from mlx_lm.generate import generation_stream

from outcore.decode.speculative.proposers import Draw, Guess
from outcore_drafts.mtp.hidden_states import HiddenStates

from .drafter import BlockDrafter, DraftedText, Shared

DRAFTER = "drafter"

# Tokens that the drafter takes in at a time. Few, since the plan reserves no activations for it; they fit into those of
# a chunk of the model.
STEP = 16


class BlockProposer:
    """Asks a drafter for one token after the other.

    The drafter knows the text from the first token on whose states are there.

    Args:
        network, shared: the drafter and the model's parts that it uses.
        draw: as in ``Drafting.proposer``.
        hidden: the states of the text's tokens, except the last.
    """

    name = DRAFTER
    cheaper = None

    def __init__(self, network: BlockDrafter, shared: Shared, draw: Draw, hidden: HiddenStates) -> None:
        self._network: BlockDrafter | None = network
        self._shared, self._draw, self._hidden = shared, draw, hidden
        self._text: list[int] = []
        self._known: DraftedText | None = None
        self._followed = 0  # tokens whose states the drafter took in, or that lie before the first of these

    def give_up(self) -> None:
        self._network = self._known = None

    def begin(self, text: Sequence[int]) -> None:
        self._text = list(text)
        if self._known is not None:
            self._known.cut()
        with mx.stream(generation_stream):
            self._follow()

    def guess(self, drafted: Sequence[int]) -> Guess | None:
        if self._known is None:
            return None
        with mx.stream(generation_stream):
            logits = self._known.logits(drafted)
            return None if logits is None else self._draw(logits)

    def _follow(self) -> None:
        """Has the drafter take in the text's new tokens, each with the token after it."""
        if self._network is None or self._hidden.end == self._followed:
            return
        taken = self._hidden.take_pieces(self._followed, STEP)
        if taken is None:
            self._known = None
            return
        at, count, pieces = taken
        if at > self._followed or self._known is None:
            # Some states are missing: begin anew from here.
            self._known = self._network.text(self._shared)
        ids = self._text[len(self._text) - count :]
        for first, states in zip(range(0, count, STEP), pieces, strict=True):
            self._known.begin(states, mx.array(ids[first : first + STEP], dtype=mx.int32))
            mx.eval(self._known.arrays)
        self._followed = at + count
