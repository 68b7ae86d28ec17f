"""Plans what is in memory where experts are read one by one: other weights first, then caches of experts."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

from outcore.plan.candidate import Candidate, Candidates
from outcore.plan.machine_profile import Calibration
from outcore.plan.model_size import ModelSize
from outcore.plan.partition import LayerSize, StreamedPart, unit_sizes
from outcore.plan.plan import Plan
from outcore.plan.prediction import Turn, computing_s, predict
from outcore.sizes import BLOCK, slot_bytes


@dataclass(frozen=True)
class ExpertSize:
    """The ``count`` experts of one layer, of which a token uses ``used``. Bytes and ``tensors`` are per expert.

    Attributes:
        resident, read: bytes in memory and on disk.
        pieces: numbers of the layer's pieces that hold experts.
        routers: numbers of the pieces that look-ahead calls.
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
    routers: tuple[int, ...] = ()

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


# One in so many bytes beyond the smallest budget is for prompt chunks longer than the shortest.
STEP_SHARE = 16

# Fraction of missing experts that are predicted one layer before, in time to be read (56 to 65 % for code and prose
# with py-qwen35moe-30m, a quarter and a half of the experts in memory).
FORESEEN = 0.55


class OnDemand:
    """Makes plans that read experts one by one (``ModelSize.on_demand``).

    Memory goes first to routers, which look-ahead calls, then to all other weights but experts, piece by piece, and
    then to expert caches: a byte of the former saves a byte of every token, a byte of a cache less. So what a token
    reads falls with every byte of the budget.
    """

    def best(
        self,
        size: ModelSize,
        budget: int,
        least: int,
        *,
        heads: Sequence[bool],
        rings: Sequence[int],
        steps: Sequence[int],
        slots: int | None,
        calibration: Calibration,
        within: Plan | None = None,
    ) -> Plan | None:
        """Returns the plan that reads least for a token; None if the model has no experts or the budget has no room.

        Args:
            least: the smallest budget in bytes that works, with or without expert caches.
            heads: whether to stream the head: values to try.
            rings: numbers of ring slots; the smallest is taken, as more would only take memory.
            steps: lengths of prompt chunks to try, longest first.
            slots: of each layer's cache; None: as many as fit.
            within: keep in memory only what this plan does.
        """
        trunk, found = Trunk(size, within), list[Plan]()
        base = min(map(size.activations, steps))
        spare = max(0, budget - least) // STEP_SHARE
        step = next((s for s in steps if size.activations(s) - base <= spare), min(steps, key=size.activations))
        for head, unit in itertools.product(heads, trunk.units):
            bare = trunk.within(budget, head, step, min(rings), unit, slots)
            counts = None if bare is None else _counts(size, bare, budget - bare.peak_bytes, slots)
            if bare is not None and counts is not None:
                plan = replace(bare, budget_bytes=budget, smallest_budget_bytes=least)
                found.append(self.with_pools(size, plan, counts, calibration))
        return min(found, key=lambda plan: (plan.bytes_per_token, plan.run_s), default=None)

    def smallest(
        self, size: ModelSize, *, heads: Sequence[bool], rings: Sequence[int], step: int, slots: int | None
    ) -> int | None:
        trunk, found = Trunk(size), list[int]()
        for head, unit in itertools.product(heads, trunk.units):
            bare = trunk.keeping(0, head, step, min(rings), unit)
            found.append(bare.peak_bytes + _pools(size, Levels(size, bare, slots)[0]))
        return min(found, default=None)

    def with_pools(
        self, size: ModelSize, plan: Plan, counts: Sequence[tuple[int, int]], calibration: Calibration
    ) -> Plan:
        """Returns ``plan`` with other cache sizes, ``counts``: (layer, slots)."""
        experts = _experts(size)
        plan = replace(plan, pools=tuple(counts), pool_bytes=_pools(size, counts))
        reads = self.reads(plan, size, size.sequences)
        read = sum(_blocks(size, p) for p in plan.parts if not (reads and p.experts)) + size.row_bytes
        read += size.head.read if plan.head_streamed and size.head is not None else 0
        if reads:
            read += int(sum(experts[i].missing(n, size.sequences) * experts[i].read for i, n in counts))
        plan = replace(plan, bytes_per_token=read, experts=sum(experts[i].count for i, _ in counts))
        return predict(size, plan, calibration)

    def reads(self, plan: Plan, size: ModelSize, tokens: int) -> bool:
        experts = _experts(size)
        shapes = [(experts[i].count, experts[i].used, n) for i, n in plan.pools if i in experts]
        return bool(shapes) and reads_experts(tokens, shapes)

    def turns(self, size: ModelSize, plan: Plan, calibration: Calibration) -> list[Turn]:
        """Returns the predicted steps of a token's pass: computing a layer, waiting for its router, and reading those
        missing experts that prefetching had no time for."""
        passes = [(size.sequences, 1)]
        head = size.head.read if plan.head_streamed and size.head is not None else 0
        rate, trunk = calibration.read_gbps * 1e9, dict[int, int]()
        for part in plan.parts:
            trunk[part.layer] = trunk.get(part.layer, 0) + (0 if part.experts else part.read)
        rest = max(head / rate, computing_s(size.rest_kind, size.non_layer - size.tables, calibration, passes))
        rest += calibration.read_latency_s if size.tables else 0.0
        slots, every = dict(plan.pools), _experts(size)
        turns = []
        for i, layer in enumerate(size.layers):
            experts = every.get(i)
            compute = seconds = computing_s(layer.kind, active_bytes(layer), calibration, passes)
            ahead = trunk.get(i, 0) / rate
            if i in slots and experts is not None:
                missing = experts.missing(slots[i], size.sequences)
                reading = missing * experts.read / rate
                groups = -(-min(experts.count, experts.used * size.sequences) // (slots[i] or experts.used))
                if groups > 1:
                    # Each group is read, then computed for all tokens; nothing is prefetched.
                    share = experts.used * experts.resident / active_bytes(layer)
                    seconds += (groups - 1) * (compute * share + calibration.sync_s + calibration.read_latency_s)
                else:
                    reading -= min(FORESEEN * reading, compute)
                seconds += calibration.sync_s + min(1.0, missing) * calibration.read_latency_s + reading
            seconds += max(0.0, ahead - compute)
            turns.append(Turn(seconds, layer=i))
        return [*turns, Turn(rest)]


ON_DEMAND = OnDemand()


def active_bytes(layer: LayerSize) -> int:
    experts = layer.experts
    if experts is None:
        return layer.resident
    return layer.resident - (experts.count - experts.used) * experts.resident


class Trunk:
    """All weights of a model but its experts, and which of them stay in memory. ``within``: a plan to stay within."""

    def __init__(self, size: ModelSize, within: Plan | None = None) -> None:
        self._candidates, self._size, self._experts = Candidates(size), size, _experts(size)
        self.units = unit_sizes(size.layers, size.most_unit) if self._experts else []
        self._fixed = {i for i, layer in enumerate(size.layers) if not layer.streamable and i not in self._experts}
        # What may be in memory, by layer and piece (None: the whole layer), in the order in which it is taken.
        found = list[tuple[bool, int, int, int | None]]()
        for i, layer in enumerate(size.layers):
            if i in self._experts:
                routers, others = self._experts[i].routers, self._experts[i].pieces
                found += [(n not in routers, -p.resident, i, n) for n, p in enumerate(layer.pieces) if n not in others]
            elif layer.streamable:
                found.append((True, -layer.resident, i, None))
        self._items = [(i, n) for _, _, i, n in sorted(found, key=lambda item: item[:3])]
        if within is not None:
            kept = dict(within.kept)
            here = [n in kept.get(i, ()) if n is not None else i in within.resident for i, n in self._items]
            self._items = self._items[: here.index(False) if False in here else len(here)]

    def keeping(self, count: int, head: bool, step: int, ring: int, unit: int) -> Plan:
        """Returns the plan with the first ``count`` items in memory and no expert caches yet."""
        kept: dict[int, list[int]] = {}
        resident = set(self._fixed)
        for i, n in self._items[:count]:
            if n is None:
                resident.add(i)
            else:
                kept.setdefault(i, []).append(n)
        pieces = tuple((i, tuple(sorted(numbers))) for i, numbers in sorted(kept.items()))
        return Candidate(self._candidates, frozenset(resident), head, step, ring, unit, pieces, True).bare

    def within(self, budget: int, head: bool, step: int, ring: int, unit: int, slots: int | None) -> Plan | None:
        """Returns the plan with as many items in memory as the budget has room for; None: not even without any."""

        def needs(count: int) -> int:
            bare = self.keeping(count, head, step, ring, unit)
            return bare.peak_bytes + _pools(self._size, Levels(self._size, bare, slots)[0])

        fitting = bisect_right(range(len(self._items) + 1), budget, key=needs)
        return self.keeping(fitting - 1, head, step, ring, unit) if fitting else None


Counts = list[tuple[int, int]]


class Levels:
    """(layer, slots) of caches of growing size: of none if the ring's slots have room for experts, then layer by layer
    of a token's experts, then of one more expert, or the same fraction of a larger layer's. ``slots``: of each layer;
    None: any."""

    def __init__(self, size: ModelSize, bare: Plan, slots: int | None) -> None:
        self._experts, self._slots = _experts(size), slots
        self._most = max((e.count for e in self._experts.values()), default=0)
        at = max(bare.shared_at, size.head.slot if bare.head_streamed and size.head is not None else 0)
        room = bare.unit_bytes - at
        lent = slots is None and all(room_for(room, e.resident, e.tensors) for e in self._experts.values())
        self._lead = min((e.used for e in self._experts.values()), default=0) if lent else 0

    def __len__(self) -> int:
        if self._slots is not None:
            return 1
        return (self._most - max(0, self._lead - 1)) * len(self._experts) + (self._lead > 0)

    def __getitem__(self, n: int) -> Counts:
        # In each round, every layer grows by one expert, or by a token's in the first one.
        grown, more = divmod(n if self._lead else n + len(self._experts), len(self._experts))
        return [(i, self._of(e, grown + (at < more))) for at, (i, e) in enumerate(self._experts.items())]

    def _of(self, experts: ExpertSize, grown: int) -> int:
        if self._slots is not None:
            return min(self._slots, experts.count)
        if not grown and self._lead:
            return 0
        share = (grown + max(0, self._lead - 1)) * experts.count // self._most
        return min(experts.count, max(experts.used if self._lead else 1, share))


def _blocks(size: ModelSize, part: StreamedPart) -> int:
    """Returns the bytes of the blocks that a part's pieces lie in."""
    pieces = [size.layers[part.layer].pieces[n] for n in part.pieces]
    return min(part.slot, part.read + sum(p.slot - p.read for p in pieces)) if pieces else part.read


def room_for(nbytes: int, expert: int, tensors: int) -> int:
    """Returns how many experts' slots fit into a part of a ring's slot."""
    return max(0, nbytes // BLOCK * BLOCK - BLOCK * (tensors + 1)) // expert


def _counts(size: ModelSize, bare: Plan, room: int, slots: int | None) -> Counts | None:
    """Returns the largest caches that fit; None if there is no room."""
    levels = Levels(size, bare, slots)
    fitting = bisect_right(levels, room, key=lambda counts: _pools(size, counts))
    return levels[fitting - 1] if fitting else None


def _pools(size: ModelSize, counts: Sequence[tuple[int, int]]) -> int:
    """Returns the bytes of caches of these sizes, in which tensors begin at blocks, and of a call's largest copy."""
    experts, pools, copied = _experts(size), 0, 0
    for layer, slots in counts:
        each = experts[layer]
        pools += bool(slots) * slot_bytes(slots * each.resident + BLOCK * each.tensors)
        copied = max(copied, slots * each.copied)
    return pools + copied


def _experts(size: ModelSize) -> dict[int, ExpertSize]:
    return {i: cast(ExpertSize, layer.experts) for i, layer in enumerate(size.layers) if layer.experts is not None}
