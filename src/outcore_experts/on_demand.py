"""The functions and classes that the core calls (``outcore.engine.extensions.OnDemand``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import mlx.core as mx

from outcore.engine.layer_sizes import Cast, Place, nbytes
from outcore.engine.resident_layers import another
from outcore.modules.layers import Layer, Projection
from outcore.plan.machine_profile import Calibration
from outcore.plan.model_size import ModelSize
from outcore.plan.plan import Plan
from outcore.plan.planner import ENOUGH_STEP, SLOTS, prefill_steps
from outcore.sizes import BLOCK, round_up

from .expert_cache import stacked
from .expert_plan import ON_DEMAND, ExpertSize
from .experts import Experts, experts_for
from .switches import Switch, find_switch, routers_of, switches_in

if TYPE_CHECKING:
    from outcore.engine.session import Session

__all__ = ["CacheSizes", "experts", "experts_for", "switches_in"]


def experts(
    layer: Layer, pieces: Sequence[Projection], casts: Sequence[mx.Dtype | None], place: Place, used: int, to: Cast
) -> tuple[Switch | None, ExpertSize | None]:
    switch = find_switch(layer, pieces)
    if switch is None or not used:
        return switch, None
    tensors = stacked(layer, switch, casts, place)
    held = sum(t.held_bytes for t in tensors)
    read = sum(t.read_bytes for t in tensors)
    cast = any(t.dtype is not None for t in tensors)
    copied = sum(nbytes(p.array, to.target(f"{layer.path}.{p.path}", p.array.dtype)) for p in switch.held)
    if place.direct:
        # Whole blocks are read, of which other experts have a part.
        ends = [(t.info.offset + n * t.read_bytes, t.read_bytes) for t in tensors for n in range(switch.experts)]
        read = sum(round_up(at + n, BLOCK) - at // BLOCK * BLOCK for at, n in ends) // switch.experts
    routers = routers_of(layer, pieces, switch)
    size = ExpertSize(
        switch.experts, used, held, read, switch.pieces, len(tensors), cast, copied // switch.experts, routers
    )
    return switch, size


Counts = tuple[tuple[int, int], ...]


class CacheSizes:
    """Resizes the expert caches of a running model between passes: when memory is short, or a text grows, or not any
    more."""

    def __init__(self, session: Session, calibration: Calibration) -> None:
        self.session, self._calibration = session, calibration
        self._before: Counts | None = None  # each layer's slots before they were reduced

    @property
    def spare(self) -> list[int]:
        pools = self.session.plan.pools
        return [self._slot] * sum(n - 1 for _, n in pools if n)

    @property
    def returning(self) -> list[int]:
        return [self._slot] * (_slots(self._whole) - _slots(self.session.plan.pools))

    def move(self, slots: int) -> int:
        """Removes ``slots`` slots, or adds them if negative; layers keep their original proportions. Returns how
        many."""
        now, whole = self.session.plan.pools, self._whole
        wanted = max(sum(n > 0 for _, n in whole), min(_slots(whole), _slots(now) - slots))
        share = wanted / max(1, _slots(whole))
        counts = {i: max(min(1, n), int(n * share)) for i, n in whole}
        for i, n in whole:  # distribute the slots that rounding down left over
            counts[i] += counts[i] < n and sum(counts.values()) < wanted
        if (changed := tuple(counts.items())) == now:
            return 0
        self._change(ON_DEMAND.with_pools(self.session.size, self.session.plan, changed, self._calibration))
        self._before = whole if changed != whole else None
        return abs(_slots(now) - _slots(changed))

    def fit(self, size: ModelSize, step: int | None, allowed: int) -> None:
        plan, fitting = self.session.plan, None
        steps = [step] if step else [s for s in prefill_steps(size.prompt) if s <= ENOUGH_STEP]
        # Less than the budget may be free now; if no plan fits into that, plan for the budget, as loading does.
        for room in (allowed, plan.budget_bytes):
            fitting = fitting or ON_DEMAND.best(
                size,
                room,
                plan.smallest_budget_bytes,
                heads=[True] if plan.head_streamed else [False, True] if size.head is not None else [False],
                rings=SLOTS,
                steps=steps,
                slots=None,
                calibration=self._calibration,
                within=plan,
            )
        if fitting is None:
            # Streamed layers cannot become resident here: their arrays are gone.
            fitting = another(self.session, size, plan.budget_bytes, prefill_step=step, resident=0)
        self._before = None
        self._change(replace(fitting, budget_bytes=plan.budget_bytes))

    @property
    def _whole(self) -> Counts:
        return self._before or self.session.plan.pools

    @property
    def _slot(self) -> int:
        return self.session.plan.pool_bytes // max(1, _slots(self.session.plan.pools))

    def _change(self, plan: Plan) -> None:
        before, streaming = self.session.plan, self.session.streaming
        if plan.pools and streaming is not None and streaming.experts is not None and _ring(before) == _ring(plan):
            streaming.drain()
            cast(Experts, streaming.experts).resize([n for _, n in plan.pools])
        else:
            self.session.stream(plan)
        self.session.adopt(plan)


def _slots(counts: Counts) -> int:
    return sum(n for _, n in counts)


def _ring(plan: Plan) -> tuple[object, ...]:
    lent = [i for i, n in plan.pools if not n]
    return plan.slots, plan.unit_bytes, plan.resident, plan.kept, plan.parts, plan.head_streamed, lent
