"""Candidates for a plan: which layers are resident, the slots that others are streamed through, and the memory that all
take. ``replan`` computes the same for a running model whose resident layers change."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from operator import attrgetter, itemgetter

from ..sizes import slot_bytes
from .machine_profile import Calibration
from .model_size import ModelSize
from .partition import Cut, StreamedPart, cut_layer, spread
from .plan import Plan
from .prediction import predict

# Freed memory that MLX may keep for reuse (``mx.set_cache_limit``): a share of everything else, at least
# ``ALLOCATOR_LEAST`` and at most ``ModelSize.reuse`` bytes.
ALLOCATOR_SHARE, ALLOCATOR_LEAST = 1 / 32, 100_000


class Candidates:
    """Makes candidates for one model; keeps results that several use: cuts of equal layers, activations, layer sets."""

    def __init__(self, size: ModelSize) -> None:
        self.size = size
        first = dict[object, int]()
        self._alike = [first.setdefault(layer, i) for i, layer in enumerate(size.layers)]
        self._cuts = dict[tuple[int, tuple[int, ...], int, bool], Cut]()
        self._activations = dict[tuple[int, int | None], int]()

    def streamed(
        self, resident: frozenset[int], kept: dict[int, tuple[int, ...]], unit: int, apart: bool
    ) -> list[tuple[int, Cut]]:
        """Returns index and cut of each streamed layer: pieces not in ``kept``, in parts of at most ``unit`` bytes."""
        found = []
        for i, alike in enumerate(self._alike):
            if i not in resident:
                key = alike, kept.get(i, ()), unit, apart
                if key not in self._cuts:
                    self._cuts[key] = cut_layer(self.size.layers[i], key[1], unit, apart)
                found.append((i, self._cuts[key]))
        return found

    def activations(self, step: int, between: int | None) -> int:
        if (step, between) not in self._activations:
            self._activations[step, between] = self.size.activations(step, between)
        return self._activations[step, between]

    @cached_property
    def _stay(self) -> list[frozenset[int]]:
        return [frozenset(place(self.size, count)) for count in range(len(self.size.layers) + 1)]

    @cached_property
    def _weights(self) -> list[int]:
        return [sum([self.size.layers[i].resident for i in stay]) for stay in self._stay]

    def at(self, count: int, head: bool, step: int, ring: int, unit: int) -> Candidate:
        return Candidate(self, self._stay[count], head, step, ring, unit)

    def first(
        self, counts: Iterable[int], head: bool, step: int, ring: int, unit: int, budget: int
    ) -> Candidate | None:
        """Returns the candidate with the first number of resident layers in ``counts`` that fits the budget."""
        room = budget - self.fixed(head, step)
        for count in counts:
            if self._weights[count] <= room:
                found = self.at(count, head, step, ring, unit)
                if found.peak <= budget:
                    return found
        return None

    def smallest(self, counts: Iterable[int], head: bool, step: int, ring: int, unit: int) -> int:
        """Returns the smallest peak in bytes over these numbers of resident layers."""
        found, fixed = -1, self.fixed(head, step)
        for count in counts:
            if found < 0 or self._weights[count] + fixed < found:
                peak = self.at(count, head, step, ring, unit).peak
                found = peak if found < 0 else min(found, peak)
        return found

    def fixed(self, head: bool, step: int) -> int:
        """Returns a lower bound of the bytes of everything but layers, slots and copies."""
        size = self.size
        streamed = size.tables + (size.head.resident if head and size.head is not None else 0)
        return size.non_layer - streamed + self.activations(step, None) + (0 if size.on_disk else size.caches(0.0))


@dataclass(frozen=True, eq=False)
class Candidate:
    """A plan without its predictions.

    Attributes:
        head: whether the head is streamed.
        step: tokens of a prompt's chunk.
        slots: how many slots the ring has.
        unit: most bytes of a part of a layer, unless a layer cannot be cut so small.
        kept: index of each streamed layer with resident pieces, and the indices of these.
        apart: experts are units of their own.
    """

    of: Candidates
    resident: frozenset[int]
    head: bool
    step: int
    slots: int
    unit: int
    kept: tuple[tuple[int, tuple[int, ...]], ...] = ()
    apart: bool = False

    @property
    def size(self) -> ModelSize:
        return self.of.size

    @cached_property
    def peak(self) -> int:
        """Most bytes in use at once. Computed without ``bare``, since of most candidates only this is needed."""
        used, freed = self._used
        return used + freed

    @cached_property
    def _streamed(self) -> list[tuple[int, Cut]]:
        return self.of.streamed(self.resident, dict(self.kept), self.unit, self.apart)

    @cached_property
    def _streams(self) -> bool:
        return self.head or len(self.resident) < len(self.size.layers)

    @cached_property
    def unit_bytes(self) -> int:
        largest = 0
        for _, cut in self._streamed:
            largest = max(largest, cut.slot)
        if self.head and self.size.head is not None:
            # The head's slices are as large as the largest other unit, or ``unit`` if there is no other.
            largest = max(largest or self.unit, self.size.head.slot)
        return largest

    @cached_property
    def _weights(self) -> int:
        size, weights = self.size, self.size.non_layer
        for i in self.resident:
            weights += size.layers[i].resident
        for i, numbers in self.kept:
            for n in numbers:
                weights += size.layers[i].pieces[n].resident
        if self.head and size.head is not None:
            weights -= size.head.resident
        return weights - size.tables if self._streams else weights

    @cached_property
    def _activations(self) -> int:
        """Bytes of activations, and of streamed weights' copies in another dtype or decoded form."""
        size, cast, between = self.size, 0, None
        for _, cut in self._streamed:
            cast = max(cast, cut.cast)
            if cut.between is not None:
                between = max(between or 0, cut.between)
        if self.head and size.head is not None:
            cast = max(cast, -(-size.head.cast * self.unit_bytes // max(size.head.read, self.unit_bytes)))
        return self.of.activations(self.step, between) + cast

    @cached_property
    def _caches(self) -> int:
        size = self.size
        if size.on_disk and len(self.resident) == len(size.layers):
            # Caches of resident layers stay in memory.
            size = replace(size, on_disk=False)
        share = together(self.resident, len(size.layers)) if size.sequences > 1 else 0.0
        return size.caches(share) + (sum(map(size.kv, self.resident)) if size.on_disk else 0)

    @cached_property
    def _used(self) -> tuple[int, int]:
        """Bytes in use, and freed bytes kept for reuse."""
        slots = self.slots * slot_bytes(self.unit_bytes) if self._streams else 0
        used = self._weights + slots + self._caches + self._activations
        return used, int(min(max(used * ALLOCATOR_SHARE, ALLOCATOR_LEAST), self.size.reuse))

    @cached_property
    def bare(self) -> Plan:
        """The plan without its budget, smallest budget and predictions."""
        size = self.size
        parts = [
            StreamedPart(i, p.pieces, p.slot, p.read, p.cast, p.experts) for i, cut in self._streamed for p in cut.parts
        ]
        streamed = tuple([i for i, _ in self._streamed])
        read = (sum(map(size.kv_read, streamed)) if size.on_disk else 0) + size.row_bytes * self._streams
        for _, cut in self._streamed:
            read += cut.read
        return Plan(
            budget_bytes=0,
            resident=tuple(sorted(self.resident)),
            streamed=streamed,
            kept=self.kept,
            parts=tuple(parts),
            head_streamed=self.head,
            slots=self.slots if self._streams else 0,
            unit_bytes=self.unit_bytes if self._streams else 0,
            weight_bytes=self._weights,
            cache_bytes=self._caches,
            kv_slot=size.kv_slot if parts else 0,
            activation_bytes=self._activations,
            allocator_bytes=self._used[1],
            prefill_step=self.step,
            context=size.context,
            bytes_per_token=read + (size.head.read if self.head and size.head is not None else 0),
            smallest_budget_bytes=0,
        )

    def plan(self, budget: int, least: int, calibration: Calibration) -> Plan:
        """Returns the plan with predicted seconds."""
        return predict(self.size, replace(self.bare, budget_bytes=budget, smallest_budget_bytes=least), calibration)

    def fill(self, budget: int) -> Candidate:
        """Returns the candidate with single pieces resident in the memory left: the largest that fit first, evenly
        spread over the layers."""
        room = budget
        while room > self.peak:
            filled = self._filled(room)
            if filled.peak <= budget:
                return filled
            # Layers are cut elsewhere now, and more activations are in memory between the parts.
            room -= filled.peak - budget
        return self

    def _filled(self, budget: int) -> Candidate:
        # Freed memory kept for reuse grows with the rest.
        left = int((budget - self.peak) / (1 + ALLOCATOR_SHARE))
        layers = [(i, self.size.layers[i].pieces) for i in range(len(self.size.layers)) if i not in self.resident]
        kept: dict[int, list[int]] = {i: [] for i, _ in layers}
        for nbytes in sorted(set(map(attrgetter("resident"), chain.from_iterable(map(itemgetter(1), layers)))))[::-1]:
            while left >= nbytes > 0:
                free = []
                for i, pieces in layers:
                    if len(kept[i]) + 1 < len(pieces):  # one piece of each layer stays streamed
                        for n, piece in enumerate(pieces):
                            if piece.resident == nbytes and n not in kept[i]:
                                free.append((i, n))
                                break
                if not free:
                    break
                count = min(len(free), left // nbytes)
                for at in spread(count, len(free)):
                    kept[free[at][0]].append(free[at][1])
                left -= count * nbytes
        return replace(self, kept=tuple([(i, tuple(sorted(numbers))) for i, numbers in kept.items() if numbers]))


def together(resident: frozenset[int], layers: int) -> float:
    """Returns the largest fraction of the layers that is computed without a wait: a run of resident layers and the
    streamed one after it."""
    longest = run = 0
    for i in range(layers):
        run = run + 1 if i in resident else 0
        longest = max(longest, run)
    return min(longest + 1, layers) / max(layers, 1)


def place(size: ModelSize, count: int) -> list[int]:
    """Returns indices of ``count`` layers to be resident: every layer that cannot be streamed, others evenly spread."""
    fixed = [i for i, layer in enumerate(size.layers) if not layer.streamable]
    free = [i for i, layer in enumerate(size.layers) if layer.streamable]
    return sorted([*fixed, *[free[i] for i in spread(max(0, count - len(fixed)), len(free))]])


def replan(size: ModelSize, plan: Plan, resident: Iterable[int], calibration: Calibration) -> Plan:
    """Returns the plan with other resident layers and the same ring. ``size`` may be larger than the plan's was."""
    made = _replanned(size, plan, resident)
    if plan.pools and size.on_demand is not None:
        return size.on_demand.with_pools(size, made, plan.pools, calibration)
    return predict(size, made, calibration)


def replanned_bytes(size: ModelSize, plan: Plan, resident: Iterable[int]) -> int:
    """Returns the peak of ``replan``'s plan without predicting its seconds."""
    return _replanned(size, plan, resident).peak_bytes


def _replanned(size: ModelSize, plan: Plan, resident: Iterable[int]) -> Plan:
    stay = frozenset(resident)
    kept = tuple((i, pieces) for i, pieces in plan.kept if i not in stay)
    candidate = Candidate(
        Candidates(size),
        stay,
        plan.head_streamed,
        plan.prefill_step,
        plan.slots,
        plan.unit_bytes,
        kept,
        bool(plan.pools),
    )
    bare = replace(candidate.bare, unit_bytes=plan.unit_bytes) if plan.slots else candidate.bare
    return replace(
        bare,
        budget_bytes=plan.budget_bytes,
        smallest_budget_bytes=plan.smallest_budget_bytes,
        pools=plan.pools,
        pool_bytes=plan.pool_bytes,
        experts=plan.experts,
    )


def thin(layers: Sequence[int], count: int) -> list[int]:
    """Returns ``count`` of these layers, evenly spread."""
    return [layers[i] for i in spread(min(count, len(layers)), len(layers))]


def farthest(layers: Sequence[int], others: Sequence[int], count: int, of: int) -> list[int]:
    """Picks ``count`` layers one by one, each the farthest from ``others`` and those picked before.

    Distance wraps around: after the last of ``of`` layers comes the first.
    """
    there, left, found = list(others), list(layers), []
    for _ in range(min(count, len(left))):
        best = max(left, key=lambda i: min((min(abs(i - j), of - abs(i - j)) for j in there), default=of))
        left.remove(best)
        there.append(best)
        found.append(best)
    return sorted(found)
