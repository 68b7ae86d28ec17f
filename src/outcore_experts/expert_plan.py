"""Routed experts in numbers: what they weigh, how often they will be in memory, and plans that keep all else there and
of the experts as many as there is room for: the rest is read one by one."""

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
    """The experts of one layer. Bytes are of one of them.

    Attributes:
        count: how many there are; ``used``: by a token.
        resident: in memory; ``read``: on disk.
        pieces: of the layer, those that are its experts'.
        tensors: that it is made of.
        cast: they are held in another dtype than on disk.
        copied: of what is in memory by expert in any case (an adapter's): a call copies it for each slot.
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
        """As the function, of this layer."""
        return missing(self.count, self.used, slots, tokens)

    @property
    def on_demand(self) -> OnDemand:
        """What makes plans with expert caches."""
        return ON_DEMAND


HITS = ((0.0, 0.0), (0.0625, 0.18), (0.1, 0.25), (0.25, 0.53), (0.5, 0.78), (0.75, 0.93), (1.0, 1.0))
"""Share of a layer's experts that have slots, and of uses that find theirs there: means of 2,500 tokens of code and of
prose (py-qwen35moe-30m, ``ExpertPolicy``)."""


def hit_rate(share: float) -> float:
    """Uses that find their expert in memory, as a share of all, where so large a share of them has slots."""
    for (a, low), (b, high) in itertools.pairwise(HITS):
        if share <= b:
            return low + (high - low) * (share - a) / (b - a)
    return 1.0


def distinct(count: int, used: int, tokens: int) -> float:
    """Experts that so many tokens use between them, if each chose by chance: they use fewer, as a rule."""
    return count * (1 - (1 - min(1.0, used / count)) ** tokens)


MOST_GROUPS = 3
"""Times that experts may be computed with for one call, a pool full at a time, rather than let all of them pass by."""

WORTH = 0.8
"""Reading what is missing is worth its waits where that is less than this share of what would pass by."""


def missing(count: int, used: int, slots: int, tokens: int) -> float:
    """Experts that a call for so many tokens has to read, on average, with so many slots for those of its layer."""
    wanted = distinct(count, used, tokens)
    return max(wanted * (1 - hit_rate(slots / count)), wanted - slots)


def pooled_sweep(tokens: int, shapes: Sequence[tuple[int, int, int]]) -> bool:
    """Whether a sweep over so many tokens reads what it uses; else all experts pass by, each read once.

    Args:
        shapes: of each layer, experts, those that a token uses, and slots.
    """
    if tokens == 1:
        return True
    if any(distinct(count, used, tokens) > MOST_GROUPS * slots for count, used, slots in shapes):
        return False
    reads = sum(missing(*shape, tokens) for shape in shapes)
    return reads <= WORTH * sum(count - slots for count, _, slots in shapes)


FORESEEN = 0.55
"""Of the experts that are missing, those that the layer before asks for, where there is time to read them (56 to 65 %
of code and prose with py-qwen35moe-30m, a quarter and a half of the experts in memory)."""


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
            plan = self.with_pools(
                size, replace(bare, budget_bytes=budget, smallest_budget_bytes=least), counts, calibration
            )
            if best is None or plan.run_s < best.run_s:
                best = plan
        return best

    def smallest(self, size: ModelSize, *, rings: Sequence[int], step: int, slots: int) -> int | None:
        """The smallest budget in bytes with pools of so many slots; None: there is none."""
        pools = _pools(size, [(i, min(slots, e.count)) for i, e in _experts(size).items()])
        return min((bare.peak_bytes + pools for bare in _bare(size, rings, [step])), default=None)

    def with_pools(
        self, size: ModelSize, plan: Plan, counts: Sequence[tuple[int, int]], calibration: Calibration
    ) -> Plan:
        """The plan with other pools: of each layer the slots."""
        experts = _experts(size)
        read = sum(experts[i].missing(n, size.sequences) * experts[i].read for i, n in counts)
        plan = replace(plan, pools=tuple(counts), pool_bytes=_pools(size, counts), bytes_per_token=int(read))
        return predict(size, replace(plan, experts=sum(experts[i].count for i, _ in counts)), calibration)

    def reads(self, plan: Plan, size: ModelSize, tokens: int) -> bool:
        """Whether a forward pass over so many tokens takes experts from the caches."""
        experts = _experts(size)
        shapes = [(experts[i].count, experts[i].used, n) for i, n in plan.pools if i in experts]
        return bool(shapes) and pooled_sweep(tokens, shapes)

    def turns(self, size: ModelSize, plan: Plan, calibration: Calibration) -> list[Turn]:
        """What a token of every sequence is made of where experts are read one by one: computing, a wait for
        each router, and what is missing then and was not read while the layer before was computed."""
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
                    # One after the other, each read, waited for and computed with for all tokens; nothing is foreseen.
                    share = experts.used * experts.resident / active_bytes(layer)
                    seconds += (groups - 1) * (compute * share + calibration.sync_s + calibration.read_latency_s)
                else:
                    reading -= min(FORESEEN * reading, compute)
                seconds += calibration.sync_s + min(1.0, missing) * calibration.read_latency_s + reading
            turns.append(Turn(seconds, layer=i))
        return [*turns, Turn(rest)]


ON_DEMAND = OnDemand()


def active_bytes(layer: LayerSize) -> int:
    """Bytes of a layer's weights that one token is computed with."""
    experts = layer.experts
    if experts is None:
        return layer.resident
    return layer.resident - (experts.count - experts.used) * experts.resident


def _bare(size: ModelSize, rings: Sequence[int], steps: Sequence[int]) -> Iterator[Plan]:
    """Plans with all but experts in memory, without pools yet."""
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
    """Slots for each layer's pool in so many bytes, the same share of each layer's experts; None: not one for each."""
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
    """Bytes of pools of so many slots, each of whose tensors begins at a block, and of what one layer's call copies."""
    experts, pools, copied = _experts(size), 0, 0
    for layer, slots in counts:
        each = experts[layer]
        pools += slot_bytes(slots * each.resident + BLOCK * each.tensors)
        copied = max(copied, slots * each.copied)
    return pools + copied


def _experts(size: ModelSize) -> dict[int, ExpertSize]:
    """By layer."""
    return {i: cast(ExpertSize, layer.experts) for i, layer in enumerate(size.layers) if layer.experts is not None}
