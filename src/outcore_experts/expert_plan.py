"""Plans expert caches: all other weights are resident, as many experts as fit are cached, and the others are read one
by one."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

from outcore.plan.candidate import Candidate, Candidates
from outcore.plan.machine_profile import Calibration
from outcore.plan.model_size import ModelSize
from outcore.plan.partition import LayerSize, unit_sizes
from outcore.plan.plan import Plan
from outcore.plan.prediction import Turn, computing_s, predict
from outcore.sizes import BLOCK, slot_bytes


@dataclass(frozen=True)
class ExpertSize:
    """The ``count`` experts of one layer, of which a token uses ``used``. Bytes and ``tensors`` are per expert.

    Attributes:
        resident, read: bytes in memory and on disk.
        pieces: numbers of the layer's pieces that hold experts.
        cast: whether experts have another dtype in memory than on disk.
        copied: bytes of parameters that stay in memory (an adapter's) and that a call copies for each slot.
    """

    count: int
    used: int
    resident: int
    read: int
    pieces: tuple[int, ...]
    tensors: int = 1
    cast: bool = False
    copied: int = 0

    def missing(self, slots: int, tokens: int = 1) -> float:
        return missing(self.count, self.used, slots, tokens)

    @property
    def on_demand(self) -> OnDemand:
        return ON_DEMAND


# (fraction of a layer's experts that have slots, hit rate): means over 2,500 tokens of code and of prose
# (py-qwen35moe-30m, ``ExpertPolicy``).
HITS = ((0.0, 0.0), (0.0625, 0.18), (0.1, 0.25), (0.25, 0.53), (0.5, 0.78), (0.75, 0.93), (1.0, 1.0))


def hit_rate(share: float) -> float:
    for (a, low), (b, high) in itertools.pairwise(HITS):
        if share <= b:
            return low + (high - low) * (share - a) / (b - a)
    return 1.0


def distinct(count: int, used: int, tokens: int) -> float:
    """Returns how many different experts ``tokens`` tokens use if each chooses at random; real tokens use fewer."""
    return count * (1 - (1 - min(1.0, used / count)) ** tokens)


# If a call's experts exceed the slots, it is computed in at most so many groups; with more, the ring streams all.
MOST_GROUPS = 3

# Single experts are read if they are at most this fraction of the experts that the ring would read; waits cost, too.
WORTH = 0.8


def missing(count: int, used: int, slots: int, tokens: int) -> float:
    """Returns how many experts a call of ``tokens`` tokens reads on average if the layer's cache has ``slots``
    slots."""
    wanted = distinct(count, used, tokens)
    return max(wanted * (1 - hit_rate(slots / count)), wanted - slots)


def reads_experts(tokens: int, shapes: Sequence[tuple[int, int, int]]) -> bool:
    """Whether a pass of ``tokens`` tokens reads single experts; otherwise all are streamed. ``shapes``: (experts, used,
    slots) of each layer."""
    if tokens == 1:
        return True
    if any(distinct(count, used, tokens) > MOST_GROUPS * slots for count, used, slots in shapes):
        return False
    reads = sum(missing(*shape, tokens) for shape in shapes)
    return reads <= WORTH * sum(count - slots for count, _, slots in shapes)


# Fraction of missing experts that are predicted one layer before, in time to be read (56 to 65 % for code and prose
# with py-qwen35moe-30m, a quarter and a half of the experts in memory).
FORESEEN = 0.55


class OnDemand:
    """Makes plans with expert caches (``ModelSize.on_demand``)."""

    def best(
        self,
        size: ModelSize,
        budget: int,
        least: int,
        *,
        rings: Sequence[int],
        steps: Sequence[int],
        slots: int | None,
        calibration: Calibration,
    ) -> Plan | None:
        """Returns the fastest plan with expert caches; None if the model has no experts or the budget has no room.

        Args:
            least: the smallest budget in bytes that works, with or without expert caches.
            rings: numbers of ring slots to try, for passes that stream all experts.
            steps: lengths of prompt chunks to try, longest first.
            slots: of each layer's cache; None: as many as fit.
        """
        best: Plan | None = None
        for bare in _bare(size, rings, steps):
            counts = _counts(size, budget - bare.peak_bytes, slots)
            if counts is None:
                continue
            plan = self.with_pools(
                size, replace(bare, budget_bytes=budget, smallest_budget_bytes=least), counts, calibration
            )
            if best is None or plan.run_s < best.run_s:
                best = plan
        return best

    def smallest(self, size: ModelSize, *, rings: Sequence[int], step: int, slots: int) -> int | None:
        pools = _pools(size, [(i, min(slots, e.count)) for i, e in _experts(size).items()])
        return min((bare.peak_bytes + pools for bare in _bare(size, rings, [step])), default=None)

    def with_pools(
        self, size: ModelSize, plan: Plan, counts: Sequence[tuple[int, int]], calibration: Calibration
    ) -> Plan:
        """Returns ``plan`` with other cache sizes, ``counts``: (layer, slots)."""
        experts = _experts(size)
        read = sum(experts[i].missing(n, size.sequences) * experts[i].read for i, n in counts)
        plan = replace(plan, pools=tuple(counts), pool_bytes=_pools(size, counts), bytes_per_token=int(read))
        return predict(size, replace(plan, experts=sum(experts[i].count for i, _ in counts)), calibration)

    def reads(self, plan: Plan, size: ModelSize, tokens: int) -> bool:
        experts = _experts(size)
        shapes = [(experts[i].count, experts[i].used, n) for i, n in plan.pools if i in experts]
        return bool(shapes) and reads_experts(tokens, shapes)

    def turns(self, size: ModelSize, plan: Plan, calibration: Calibration) -> list[Turn]:
        """Returns the predicted steps of a token's pass: computing a layer, waiting for its router, and reading those
        missing experts that prefetching had no time for."""
        passes = [(size.sequences, 1)]
        head = size.head if plan.head_streamed else None
        outside = size.non_layer - size.tables - (head.resident if head is not None else 0)
        rest = computing_s(size.rest_kind, outside, calibration, passes)
        rest += calibration.read_latency_s if size.tables else 0.0
        slots, every = dict(plan.pools), _experts(size)
        turns = []
        for i, layer in enumerate(size.layers):
            experts = every.get(i)
            compute = seconds = computing_s(layer.kind, active_bytes(layer), calibration, passes)
            if i in slots and experts is not None:
                missing = experts.missing(slots[i], size.sequences)
                reading = missing * experts.read / calibration.read_gbps / 1e9
                groups = -(-min(experts.count, experts.used * size.sequences) // slots[i])
                if groups > 1:
                    # Each group is read, then computed for all tokens; nothing is prefetched.
                    share = experts.used * experts.resident / active_bytes(layer)
                    seconds += (groups - 1) * (compute * share + calibration.sync_s + calibration.read_latency_s)
                else:
                    reading -= min(FORESEEN * reading, compute)
                seconds += calibration.sync_s + min(1.0, missing) * calibration.read_latency_s + reading
            turns.append(Turn(seconds, layer=i))
        return [*turns, Turn(rest)]


ON_DEMAND = OnDemand()


def active_bytes(layer: LayerSize) -> int:
    experts = layer.experts
    if experts is None:
        return layer.resident
    return layer.resident - (experts.count - experts.used) * experts.resident


def _bare(size: ModelSize, rings: Sequence[int], steps: Sequence[int]) -> Iterator[Plan]:
    """Yields plans that keep all weights but experts in memory and have no expert caches yet."""
    pooled = _experts(size)
    stay = frozenset(i for i in range(len(size.layers)) if i not in pooled)
    kept = tuple(
        (i, tuple(n for n in range(len(size.layers[i].pieces)) if n not in experts.pieces))
        for i, experts in pooled.items()
    )
    candidates = Candidates(size)
    units = unit_sizes([size.layers[i] for i in pooled], size.most_unit) if pooled else []
    for step, ring, unit in itertools.product(steps, rings, units):
        yield Candidate(candidates, stay, False, step, ring, unit, kept).bare


def _counts(size: ModelSize, room: int, slots: int | None) -> list[tuple[int, int]] | None:
    """Returns (layer, slots) with the same fraction of each layer's experts; None if there is no room."""
    experts = _experts(size)
    if slots is not None:
        counts = [(i, min(slots, e.count)) for i, e in experts.items()]
        return counts if _pools(size, counts) <= room else None
    most = max((e.count for e in experts.values()), default=0)

    def shared(n: int) -> list[tuple[int, int]]:
        return [(i, max(1, n * e.count // most)) for i, e in experts.items()]

    fitting = bisect_right(range(1, most + 1), room, key=lambda n: _pools(size, shared(n)))
    return shared(fitting) if fitting else None


def _pools(size: ModelSize, counts: Sequence[tuple[int, int]]) -> int:
    """Returns the bytes of caches of these sizes, in which tensors begin at blocks, and of a call's largest copy."""
    experts, pools, copied = _experts(size), 0, 0
    for layer, slots in counts:
        each = experts[layer]
        pools += slot_bytes(slots * each.resident + BLOCK * each.tensors)
        copied = max(copied, slots * each.copied)
    return pools + copied


def _experts(size: ModelSize) -> dict[int, ExpertSize]:
    return {i: cast(ExpertSize, layer.experts) for i, layer in enumerate(size.layers) if layer.experts is not None}
