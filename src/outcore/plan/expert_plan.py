"""Plans that keep all but routed experts in memory, and of those as many as there is room for: the rest one by one."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from ..sizes import BLOCK, slot_bytes
from .candidate import Candidate, Candidates
from .machine_profile import Calibration
from .model_size import ModelSize
from .partition import ExpertSize, unit_sizes
from .plan import Plan
from .prediction import predict

Counts = Sequence[tuple[int, int]]
"""Layers with pools, and their slots."""


def expert_plan(
    size: ModelSize,
    budget: int,
    least: int,
    *,
    rings: Sequence[int],
    steps: Sequence[int],
    slots: int | None,
    calibration: Calibration,
) -> Plan | None:
    """The fastest plan with pools of experts; None where the model has none, or the budget no room.

    Args:
        least: the smallest budget in bytes that works, with or without pools.
        rings: numbers of slots to look at for what is streamed when all experts pass by.
        steps: chunks of a prompt to look at, largest first.
        slots: of each layer's pool; None: as many as fit.
    """
    best: Plan | None = None
    for bare in _bare(size, rings, steps):
        counts = _counts(size, budget - bare.peak_bytes, slots)
        if counts is None:
            continue
        plan = with_pools(size, replace(bare, budget_bytes=budget, smallest_budget_bytes=least), counts, calibration)
        if best is None or plan.run_s < best.run_s:
            best = plan
    return best


def smallest_pooled(size: ModelSize, *, rings: Sequence[int], step: int, slots: int) -> int | None:
    """The smallest budget in bytes with pools of so many slots; None: there are no experts to be read one by one."""
    pools = _pools(size, [(i, min(slots, e.count)) for i, e in _experts(size).items()])
    return min((bare.peak_bytes + pools for bare in _bare(size, rings, [step])), default=None)


def with_pools(size: ModelSize, plan: Plan, counts: Counts, calibration: Calibration) -> Plan:
    """The plan with other pools: of each layer the slots."""
    experts = _experts(size)
    read = sum(experts[i].missing(n, size.sequences) * experts[i].read for i, n in counts)
    every = sum(experts[i].count for i, _ in counts)
    pooled = replace(
        plan, pools=tuple(counts), pool_bytes=_pools(size, counts), experts=every, bytes_per_token=int(read)
    )
    return predict(size, pooled, calibration)


def _experts(size: ModelSize) -> dict[int, ExpertSize]:
    """The experts of each layer that has some."""
    return {i: layer.experts for i, layer in enumerate(size.layers) if layer.experts is not None}


def _bare(size: ModelSize, rings: Sequence[int], steps: Sequence[int]) -> Iterator[Plan]:
    """Plans with all but experts in memory, without pools yet."""
    pooled, candidates = _experts(size), Candidates(size)
    stay = frozenset(i for i in range(len(size.layers)) if i not in pooled)
    kept = tuple(
        (i, tuple(n for n in range(len(size.layers[i].pieces)) if n not in experts.pieces))
        for i, experts in pooled.items()
    )
    units = unit_sizes([size.layers[i] for i in pooled], size.most_unit) if pooled else []
    for step, ring, unit in product(steps, rings, units):
        yield Candidate(candidates, stay, False, step, ring, unit, kept).bare


def _counts(size: ModelSize, room: int, slots: int | None) -> Counts | None:
    """Slots for each layer's pool in so many bytes, the same share of each layer's experts; None: not one for each."""
    experts = _experts(size)
    if slots is not None:
        counts = [(i, min(slots, e.count)) for i, e in experts.items()]
        return counts if _pools(size, counts) <= room else None
    most = max(e.count for e in experts.values())

    def shared(n: int) -> Counts:
        return [(i, max(1, n * e.count // most)) for i, e in experts.items()]

    fitting = bisect_right(range(1, most + 1), room, key=lambda n: _pools(size, shared(n)))
    return shared(fitting) if fitting else None


def _pools(size: ModelSize, counts: Counts) -> int:
    """Bytes of pools of so many slots, each of whose tensors begins at a block, and of what one layer's call copies."""
    pools, copied, experts = 0, 0, _experts(size)
    for layer, slots in counts:
        of = experts[layer]
        pools += slot_bytes(slots * of.resident + BLOCK * of.tensors)
        copied = max(copied, slots * of.copied)
    return pools + copied
