"""A plan being made: what stays, what is streamed through which slots, and what memory that takes."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property

from ..disk.layout import slot_bytes
from .machine_profile import Calibration
from .model_size import ModelSize
from .partition import StreamedPart, held_between, split_layer, spread
from .plan import Plan
from .prediction import predict

ALLOCATOR_SHARE, ALLOCATOR_LEAST = 1 / 32, 100_000
"""Freed memory that MLX may keep for reuse (``mx.set_cache_limit``): a share of all else, that many bytes at least, and
``ModelSize.reuse`` at most."""

Made = dict[Hashable, tuple[StreamedPart, ...]]
"""Parts of a layer, by its number, what is kept of it and the size of units; of all of them, by which are resident."""


@dataclass(frozen=True)
class Candidate:
    """A plan being made: everything but what it predicts.

    Attributes:
        made: parts that candidates of one model share.
    """

    size: ModelSize
    resident: frozenset[int]
    head: bool
    step: int
    slots: int
    unit: int
    kept: tuple[tuple[int, tuple[int, ...]], ...] = ()
    made: Made = field(default_factory=dict, compare=False)

    @cached_property
    def parts(self) -> tuple[StreamedPart, ...]:
        key = self.resident, self.kept, self.unit
        if (there := self.made.get(key)) is None:
            kept = dict(self.kept)
            streamed = (i for i in range(len(self.size.layers)) if i not in self.resident)
            there = tuple(p for i in streamed for p in self._parts_of(i, kept.get(i, ())))
            self.made[key] = there
        return there

    def _parts_of(self, i: int, kept: tuple[int, ...]) -> tuple[StreamedPart, ...]:
        key = i, kept, self.unit
        if (there := self.made.get(key)) is None:
            there = tuple(replace(p, layer=i) for p in split_layer(self.size.layers[i], kept, self.unit))
            self.made[key] = there
        return there

    @cached_property
    def unit_bytes(self) -> int:
        largest = max((p.slot for p in self.parts), default=0)
        if self.head and self.size.head is not None:
            # Slices are as large as other units are, or as slots may be where there are none.
            largest = max(largest or self.unit, self.size.head.slot)
        return largest

    @property
    def together(self) -> float:
        """Share of the layers that are computed without a wait between them: the longest run of resident layers, and
        the streamed one after it."""
        longest = run = 0
        for i in range(len(self.size.layers)):
            run = run + 1 if i in self.resident else 0
            longest = max(longest, run)
        return min(longest + 1, len(self.size.layers)) / max(len(self.size.layers), 1)

    @cached_property
    def peak(self) -> int:
        """As of ``bare``, which thousands of candidates are never asked for."""
        return self._used + self._freed

    @cached_property
    def bare(self) -> Plan:
        size, parts = self.size, self.parts
        streamed = tuple(dict.fromkeys(p.layer for p in parts))
        read = sum(p.read for p in parts) + sum(size.kv_read(i) for i in streamed)
        if self.head and size.head is not None:
            read += size.head.read
        return Plan(
            budget_bytes=0,
            resident=tuple(sorted(self.resident)),
            streamed=streamed,
            kept=self.kept,
            parts=parts,
            head_streamed=self.head,
            slots=self.slots if self._streams else 0,
            unit_bytes=self.unit_bytes if self._streams else 0,
            weight_bytes=self._weights,
            cache_bytes=self._caches,
            kv_slot=size.kv_slot if parts else 0,
            activation_bytes=self._activations,
            allocator_bytes=self._freed,
            prefill_step=self.step,
            context=size.context,
            bytes_per_token=read,
            smallest_budget_bytes=0,
        )

    @property
    def _streams(self) -> bool:
        return bool(self.parts) or self.head

    @cached_property
    def _weights(self) -> int:
        size = self.size
        weights = size.non_layer + sum(size.layers[i].resident for i in self.resident)
        weights += sum(size.layers[i].pieces[n].resident for i, numbers in self.kept for n in numbers)
        if self.head and size.head is not None:
            weights -= size.head.resident
        return weights - size.tables if self._streams else weights

    @cached_property
    def _activations(self) -> int:
        """With the copies of what is streamed that are made on the way."""
        size, parts = self.size, self.parts
        cast = max((p.cast for p in parts), default=0)
        if self.head and size.head is not None:
            cast = max(cast, -(-size.head.cast * self.unit_bytes // max(size.head.read, self.unit_bytes)))
        return size.activations(self.step, held_between(size.layers, parts)) + cast

    @cached_property
    def _used(self) -> int:
        """Bytes of all but freed memory."""
        slots = self.slots * slot_bytes(self.unit_bytes) if self._streams else 0
        return self._weights + slots + self._caches + self._activations

    @property
    def _freed(self) -> int:
        return int(min(max(self._used * ALLOCATOR_SHARE, ALLOCATOR_LEAST), self.size.reuse))

    @cached_property
    def _caches(self) -> int:
        size = self.size
        if not size.on_disk:
            return size.caches(self.together)
        if not self.parts:
            # They lie with the layers, all in memory.
            return replace(size, on_disk=False).caches(self.together)
        return size.caches(self.together) + sum(map(size.kv, self.resident))

    def fill(self, budget: int) -> Candidate:
        """Keep single pieces, the largest that fit first and of those alike one of each layer, evenly spread, with what
        whole layers have left over."""
        room = budget
        while room > self.peak:
            filled = self._filled(room)
            if filled.peak <= budget:
                return filled
            # Parts are cut elsewhere now, where more is held between them.
            room -= filled.peak - budget
        return self

    def _filled(self, budget: int) -> Candidate:
        # Freed memory kept for reuse grows with the rest.
        left = int((budget - self.peak) / (1 + ALLOCATOR_SHARE))
        layers = [(i, self.size.layers[i].pieces) for i in range(len(self.size.layers)) if i not in self.resident]
        kept: dict[int, list[int]] = {i: [] for i, _ in layers}
        for nbytes in sorted({piece.resident for _, pieces in layers for piece in pieces}, reverse=True):
            while left >= nbytes > 0:
                # Something of each stays streamed.
                alike = [
                    (i, next((n for n, p in enumerate(pieces) if p.resident == nbytes and n not in kept[i]), None))
                    for i, pieces in layers
                    if len(kept[i]) + 1 < len(pieces)
                ]
                free = [(i, n) for i, n in alike if n is not None]
                if not free:
                    break
                count = min(len(free), left // nbytes)
                for at in spread(count, len(free)):
                    kept[free[at][0]].append(free[at][1])
                left -= count * nbytes
        return replace(self, kept=tuple((i, tuple(sorted(numbers))) for i, numbers in kept.items() if numbers))

    def plan(self, budget: int, least: int, calibration: Calibration) -> Plan:
        plan = replace(self.bare, budget_bytes=budget, smallest_budget_bytes=least)
        return predict(self.size, plan, calibration)
