"""What drafting takes of a budget: weights and caches of what drafts, and the logits of what is drafted."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .machine_profile import Calibration
from .model_size import ModelSize
from .prediction import computing_s

AUTO, NONE, NGRAM = "auto", "none", "ngram"
"""What ``--draft`` takes beside the kinds that packages bring."""

SHARE, FEW = 32, 8
"""Of the budget, one in so many bytes is for drafted tokens' logits; and tokens at least, if a draft is asked for."""

MOST = 32
"""Drafted tokens at most."""

ASSUMED_CHANCE = 0.6
"""How likely a drafting model's guess is what the model says, before any was seen."""


@dataclass(frozen=True)
class Draft:
    """What is to draft for a model, before anything of it is read. Bytes.

    Attributes:
        kind: ``ngram``, or that of the source that brings it; ``name`` for people.
        weights: that it keeps in memory; ``head``: those besides, if the model's head is streamed.
        cache, growing: as in ``ModelSize``.
        uses_head: it drafts with the model's own head, which has to stay in memory.
        copies_model: it is a copy of the model's layers, which goes on from the model's own caches: those have to stay
            in memory, and a guess takes as long as a token of the model where all of it does.
        chance: how likely a guess is what the model says, before any was seen.
        detail: what its source knows of it beside.
    """

    kind: str
    name: str
    weights: int = 0
    head: int = 0
    cache: int = 0
    growing: tuple[tuple[int, int | None], ...] = ()
    uses_head: bool = False
    copies_model: bool = False
    chance: float = ASSUMED_CHANCE
    detail: Any = field(default=None, compare=False, repr=False)

    def beside(self, size: ModelSize, head_streamed: bool) -> ModelSize:
        """The model's size with what drafts for it."""
        return size.beside(self.weights + (self.head if head_streamed else 0), self.cache, self.growing)


def drafted_tokens(size: ModelSize, budget: int, explicit: bool) -> int:
    """Tokens whose logits a sweep has room for beside its own: a small share of the budget, or if asked for a few."""
    room = budget // SHARE // max(1, size.logits_row)
    return min(MOST, max(room, FEW if explicit else 0))


def guess_s(size: ModelSize, draft: Draft, calibration: Calibration) -> float:
    """Seconds in which a draft that is in memory computes a token."""
    outside = size.non_layer - size.tables
    if draft.copies_model:
        layers = sum(computing_s(x.kind, x.joined or x.resident, calibration, [(1, 1)]) for x in size.layers)
        return layers + computing_s(size.rest_kind, outside, calibration, [(1, 1)]) + calibration.sync_s
    # Another model's weights are all there are; what uses the model's head computes that, too.
    own = computing_s(size.rest_kind, outside - draft.weights, calibration, [(1, 1)]) if draft.uses_head else 0.0
    return draft.weights / calibration.weight_gbps / 1e9 + own + calibration.sync_s
