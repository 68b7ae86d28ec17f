"""Pools of experts of a running model: smaller where memory is short or a text grows, and larger again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..plan.model_size import ModelSize
from ..plan.plan import Plan
from .replanner import Replanner
from .state import State

Counts = tuple[tuple[int, int], ...]
"""Layers, and slots of their pools."""

PARTS = 8
"""Into which pools are shared out when memory is short."""


class Pools:
    """Between sweeps only.

    Args:
        stream: streams by a plan, through another ring.
    """

    def __init__(self, state: State, plans: Replanner, stream: Callable[[Plan], None]) -> None:
        self.state = state
        self._plans = plans
        self._stream = stream
        self._before: Counts | None = None  # slots, before they were fewer

    @property
    def sheddable(self) -> list[int]:
        """Bytes of each part of the pools that can be given up; one stays, and one slot of each layer."""
        parts = self._parts - 1
        return [(self._slots(self._now) - self._slots(self._of(1))) * self._slot // parts] * parts if parts else []

    @property
    def returning(self) -> list[int]:
        """Bytes of each part that was given up."""
        parts = PARTS - self._parts
        return [(self._slots(self._whole) - self._slots(self._now)) * self._slot // parts] * parts if parts else []

    def move(self, parts: int) -> int:
        """Give up so many parts of the pools, or, where that is negative, take so many back; more, where these are less
        than a slot. Returns how many."""
        had, whole = self._parts, self._whole
        wanted = max(1, min(PARTS, had - parts))
        while self._of(wanted) == self._now and 1 < wanted < PARTS:
            wanted += -1 if parts > 0 else 1
        if self._of(wanted) == self._now:
            return 0
        self._change(self._plans.with_pools(self._of(wanted)))
        self._before = whole if wanted < PARTS else None
        return abs(had - self._parts)

    def _of(self, parts: int) -> Counts:
        """Slots in so many parts."""
        return tuple((i, max(1, -(-n * parts // PARTS))) for i, n in self._whole)

    @property
    def _whole(self) -> Counts:
        return self._before or self._now

    @property
    def _now(self) -> Counts:
        return self.state.plan.pools

    @property
    def _parts(self) -> int:
        """Of ``PARTS`` those that are there: as few as have the slots."""
        if self._now == self._whole:
            return PARTS if self._now else 1
        return next(n for n in range(1, PARTS + 1) if self._slots(self._of(n)) >= self._slots(self._now))

    def _slots(self, counts: Counts) -> int:
        return sum(n for _, n in counts)

    @property
    def _slot(self) -> int:
        """Bytes of a slot, on average."""
        return self.state.plan.pool_bytes // max(1, self._slots(self._now))

    def fit(self, size: ModelSize, step: int | None, allowed: int) -> None:
        """Pools that leave room for a model of that size; or layers streamed whole, where none do.

        Args:
            step: chunks of a prompt; None: as many tokens as there is room for.
            allowed: bytes of the budget that may be used now.

        Raises:
            BudgetError: there is no room for it.
        """
        budget = self.state.plan.budget_bytes
        # Less may be free than was to be used: then what there is must do, as it does while a model is loaded.
        fitting = self._plans.pooled(size, allowed, step) or self._plans.pooled(size, budget, step)
        if fitting is None:
            # What was streamed cannot be in memory again: its arrays are gone.
            fitting = self._plans.make(size, budget, prefill_step=step, resident=0)
        self._before = None
        self._change(replace(fitting, budget_bytes=budget))

    def _change(self, plan: Plan) -> None:
        """Run by another plan, of which the pools may be all that differs."""
        before, streaming = self.state.plan, self.state.streaming
        if plan.pools and streaming is not None and streaming.experts is not None and _ring(before) == _ring(plan):
            streaming.drain()
            streaming.experts.resize([n for _, n in plan.pools])
        else:
            self._stream(plan)
        self.state.adopt(plan)


def _ring(plan: Plan) -> tuple[object, ...]:
    return plan.slots, plan.unit_bytes, plan.resident, plan.kept, plan.parts, plan.head_streamed
