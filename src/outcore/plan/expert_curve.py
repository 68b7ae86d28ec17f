"""What pools of other sizes would find of a running model's experts, so that a plan need not guess."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .expert_plan import Curve

SHARES = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4)
"""Of a layer's experts."""


class Ghosts:
    """Pools of eight sizes that hold nothing, of one layer: which experts would be in them, by the policy's scores.

    With fewer slots than a token has experts a pool finds fewer, since what comes and goes needs a slot.

    Attributes:
        uses: of experts; ``hits``: of these, those that each size would have found; int64 (sizes,).
    """

    def __init__(self, experts: int) -> None:
        self.uses, self.hits = 0, np.zeros(len(SHARES), np.int64)
        self._slots = np.array([max(1, round(share * experts)) for share in SHARES])
        self._inside = np.zeros((len(SHARES), experts), bool)

    def used(self, experts: npt.NDArray[np.int64], scores: npt.NDArray[np.float64]) -> None:
        """A call used these, each named once; ``scores`` of all, the call counted in."""
        self.uses += len(experts)
        self.hits += self._inside[:, experts].sum(1)
        self._inside[:, experts] = True
        over = self._inside.sum(1) - self._slots
        full = np.flatnonzero(over > 0)
        if not len(full):
            return
        worth = np.where(self._inside[full], scores, np.inf)
        # What a call uses is not given up for it, where there are slots for all of it.
        kept = full[self._slots[full] >= len(experts)]
        worth[np.ix_(np.searchsorted(full, kept), experts)] += scores.max() + 1
        most = int(over[full].max())
        worst = np.argpartition(worth, range(most), axis=1)[:, :most]
        for row, count, size in zip(worst, over[full].tolist(), full.tolist(), strict=True):
            self._inside[size, row[:count]] = False


def curve_of(uses: int, hits: list[int]) -> Curve:
    """What was counted, as a curve that does not fall."""
    rates = np.maximum.accumulate(np.array(hits) / max(uses, 1)).tolist()
    return ((0.0, 0.0), *zip(SHARES, rates, strict=True), (1.0, 1.0))
