"""Plans that keep all but routed experts in memory, and of those as many as there is room for: the rest one by one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from ..sizes import BLOCK, slot_bytes
from .candidate import Candidate, Candidates
from .machine_profile import Calibration
from .model_size import ModelSize
from .partition import unit_sizes
from .plan import Plan
from .prediction import predict


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
    layers = [(i, layer.experts) for i, layer in enumerate(size.layers) if layer.experts is not None]
    pools = _pools(size, [(i, min(slots, e.count)) for i, e in layers])
    return min((bare.peak_bytes + pools for bare in _bare(size, rings, [step])), default=None)


def _bare(size: ModelSize, rings: Sequence[int], steps: Sequence[int]) -> Iterator[Plan]:
    """Plans with all but experts in memory, without pools yet."""
    pooled = {i: layer.experts for i, layer in enumerate(size.layers) if layer.experts is not None}
    stay = frozenset(i for i in range(len(size.layers)) if i not in pooled)
    kept = tuple(
        (i, tuple(n for n in range(len(size.layers[i].pieces)) if n not in experts.pieces))
        for i, experts in pooled.items()
    )
    candidates = Candidates(size)
    units = unit_sizes([size.layers[i] for i in pooled], size.most_unit) if pooled else []
    for step, ring, unit in product(steps, rings, units):
        yield Candidate(candidates, stay, False, step, ring, unit, kept).bare


def with_pools(size: ModelSize, plan: Plan, counts: Sequence[tuple[int, int]], calibration: Calibration) -> Plan:
    """The plan with other pools: of each layer the slots."""
    nbytes = _pools(size, counts)
    read, every = 0.0, 0
    for i, n in counts:
        experts = size.layers[i].experts
        assert experts is not None
        every += experts.count
        read += experts.missing(n, size.sequences) * experts.read
    return predict(
        size,
        replace(plan, pools=tuple(counts), pool_bytes=nbytes, experts=every, bytes_per_token=int(read)),
        calibration,
    )


def _counts(size: ModelSize, room: int, slots: int | None) -> list[tuple[int, int]] | None:
    """Slots for each layer's pool in so many bytes, the same share of each layer's experts; None: not one for each."""
    layers = [(i, layer.experts) for i, layer in enumerate(size.layers) if layer.experts is not None]

    def nbytes(share: float) -> int:
        return _pools(size, [(i, _slots(share, e.count)) for i, e in layers])

    if slots is not None:
        counts = [(i, min(slots, e.count)) for i, e in layers]
        return counts if _pools(size, counts) <= room else None
    if nbytes(0.0) > room:
        return None
    low, high = 0.0, 1.0
    for _ in range(24):
        middle = (low + high) / 2
        low, high = (middle, high) if nbytes(middle) <= room else (low, middle)
    return [(i, _slots(low, e.count)) for i, e in layers]


def _slots(share: float, experts: int) -> int:
    return max(1, int(share * experts))


def _pools(size: ModelSize, counts: Sequence[tuple[int, int]]) -> int:
    """Bytes of pools of so many slots, each of whose tensors begins at a block, and of what one layer's call copies."""
    pools, copied = 0, 0
    for layer, slots in counts:
        experts = size.layers[layer].experts
        assert experts is not None
        pools += slot_bytes(slots * experts.resident + BLOCK * experts.tensors)
        copied = max(copied, slots * experts.copied)
    return pools + copied
