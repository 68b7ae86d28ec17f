"""What drafting costs: weights and caches of the draft, and logits of drafted tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .machine_profile import Calibration
from .model_size import ModelSize
from .prediction import computing_s

# Values of ``--draft`` in addition to the kinds that packages provide.
AUTO, NONE, NGRAM = "auto", "none", "ngram"

# One in ``SHARE`` bytes of the budget is for drafted tokens' logits; at least ``FEW`` tokens if the user chose a draft.
SHARE, FEW = 32, 8

# Most drafted tokens per pass.
MOST = 32

# Assumed chance that a draft model's guess is accepted, before any was observed.
ASSUMED_CHANCE = 0.6


@dataclass(frozen=True)
class Draft:
    """A draft before any of it is read. Bytes.

    Attributes:
        kind: ``ngram``, or the kind of the package that provides it.
        weights: bytes in memory.
        head: more of them, if the model's head is streamed.
        cache, growing: as in ``ModelSize``.
        uses_head: drafts with the model's own head, which then stays in memory.
        copies_model: a copy of the model's layers that continues from the model's own caches. These stay in memory, and
            a guess takes as long as a token of the resident model.
        chance: that a guess is accepted, before any was observed.
        detail: private data of the package.
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

    def added_to(self, size: ModelSize, head_streamed: bool) -> ModelSize:
        """Returns the model's size including this draft."""
        return size.with_model(self.weights + (self.head if head_streamed else 0), self.cache, self.growing)


def drafted_tokens(size: ModelSize, budget: int, explicit: bool) -> int:
    """Returns the drafted tokens per pass whose logits fit a small share of the budget; at least ``FEW`` if
    ``explicit``."""
    room = budget // SHARE // max(1, size.logits_row)
    return min(MOST, max(room, FEW if explicit else 0))


def guess_s(size: ModelSize, draft: Draft, calibration: Calibration) -> float:
    """Returns seconds in which a resident draft computes one token."""
    outside = size.non_layer - size.tables
    if draft.copies_model:
        layers = sum(computing_s(x.kind, x.joined or x.resident, calibration, [(1, 1)]) for x in size.layers)
        return layers + computing_s(size.rest_kind, outside, calibration, [(1, 1)]) + calibration.sync_s
    # A draft model computes its own weights, and the model's head if it uses that.
    own = computing_s(size.rest_kind, outside - draft.weights, calibration, [(1, 1)]) if draft.uses_head else 0.0
    return draft.weights / calibration.weight_gbps / 1e9 + own + calibration.sync_s
