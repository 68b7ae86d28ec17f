"""Streams all experts of a layer through the ring, for passes that use most of them, and uses the expert caches, too.

Experts that are cached are copied into the ring's slot instead of being read. After the layer is computed, the experts
that the pass used most are copied into the cache, so that the tokens after a prompt find them there.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from outcore.disk.layout import Extent, SlotCopy
from outcore.disk.reader import Read
from outcore.disk.ring import Lease, Partly, Ring
from outcore.engine.streamed_layers import StreamedUnit
from outcore.sizes import BLOCK

from .expert_cache import CachedSwitch
from .expert_policy import Load

# A cached expert's part of a tensor is not read from disk if it has at least so many bytes: skipping splits the read.
LEAST = 4 * BLOCK


@dataclass(frozen=True)
class _Stack:
    """A switch's tensor in a unit of the ring: its number, its place in a slot, and the extent that reads it."""

    tensor: int
    at: int
    extent: Extent


@dataclass
class _Window:
    """A switch and the units of the ring that stream its experts.

    Attributes:
        routed: expert indices of this pass's calls.
        loads: (expert, slot) to copy into the cache; None: not decided yet.
        left: units that are not computed yet in this pass.
    """

    switch: CachedSwitch
    units: tuple[int, ...]
    routed: list[mx.array] = field(default_factory=list)
    loads: list[Load] | None = None
    left: set[int] = field(default_factory=set)


class Windows:
    """All switches of a model whose experts have the same dtype in the cache as on disk."""

    def __init__(self, switches: Sequence[CachedSwitch], units: Sequence[StreamedUnit], ring: Ring) -> None:
        self._ring = ring
        self._stacks: dict[int, list[_Stack]] = {}
        self._windows: dict[int, _Window] = {}  # key: id of the switch's module
        self._of_unit: dict[int, _Window] = {}
        self._filling: dict[int, Read] = {}  # by unit: its latest read that also copied from a cache
        for switch in switches:
            if switch.unit.cast:
                continue
            places = {(id(p.module), p.key): n for n, p in enumerate(switch.unit.parameters)}
            mine: list[int] = []
            for i, u in enumerate(units):
                if u.rows is None and (stacks := _stacks(u, places)):
                    self._stacks[i] = stacks
                    mine.append(i)
            if mine:
                window = self._windows[id(switch.unit.switch.module)] = _Window(switch, tuple(mine))
                self._of_unit.update(dict.fromkeys(mine, window))
        ring.partly = self._partly

    def close(self) -> None:
        self._ring.partly = None
        self._windows, self._of_unit, self._filling = {}, {}, {}

    def begin(self) -> None:
        for window in self._windows.values():
            window.routed, window.loads, window.left = [], None, set(window.units)

    def route(self, switch: CachedSwitch, indices: mx.array) -> None:
        window = self._windows.get(id(switch.unit.switch.module))
        if window is not None:
            window.routed.append(indices)

    def _partly(self, unit: int) -> Partly | None:
        """Returns which bytes of a unit to read and which experts to copy from the cache; None: read the whole unit."""
        window = self._of_unit.get(unit)
        if window is None or not len(window.switch.policy.inside):
            return None
        switch, extents, copies = window.switch, list[Extent](), list[SlotCopy]()
        inside = switch.policy.slot_of.copy()
        inside[list(switch.arriving)] = -1
        stacks = self._stacks[unit]
        for extent in self._ring.units[unit].extents:
            mine = [s for s in stacks if s.extent is extent]
            begin = extent.offset
            for stack in sorted(mine, key=lambda s: s.at):
                n = switch.unit.tensors[stack.tensor].read_bytes
                if n < LEAST:
                    continue
                for first, end in _runs(inside):
                    # Read up to the cached expert; offsets on disk and in the slot still agree modulo the block.
                    start = extent.offset + stack.at - extent.at + first * n
                    if start > begin:
                        extents.append(_part(extent, begin, start))
                    begin = start + (end - first) * n
                    for expert in range(first, end):
                        source = switch.cache.place(stack.tensor, int(inside[expert]))
                        copies.append(SlotCopy(source, stack.at + expert * n))
            if begin < extent.offset + extent.nbytes:
                extents.append(_part(extent, begin, extent.offset + extent.nbytes))
        return Partly(extents, copies, functools.partial(self._begun, switch, unit))

    def _begun(self, switch: CachedSwitch, unit: int, read: Read) -> None:
        self._filling[unit] = read
        switch.filling = [r for r in switch.filling if not r.ready] + [read]

    def done(self, lease: Lease) -> None:
        """After a unit is computed, copies the experts that the pass used most from its slot into the cache."""
        window = self._of_unit.get(lease.unit)
        if window is None or not window.routed:
            return
        switch, slot = window.switch, self._ring.slots[lease.slot]
        if window.loads is None:
            window.loads = _wanted(switch, window.routed)
            switch.policy.vacate([place for _, place in window.loads])
        if lease.unit in self._filling:
            # This read has ended; if there are fewer units than slots, the one for the next pass may be running.
            self._filling.pop(lease.unit).ended()
        for stack in self._stacks[lease.unit]:
            n = switch.unit.tensors[stack.tensor].read_bytes
            for expert, place in window.loads:
                at = stack.at + expert * n
                switch.cache.move(switch.cache.place(stack.tensor, place), slot.payload[at : at + n])
        window.left.discard(lease.unit)
        if not window.left:
            switch.place(window.loads)
            window.routed = []


def _wanted(switch: CachedSwitch, routed: Sequence[mx.array]) -> list[Load]:
    used = np.concatenate([np.array(i).astype(np.int64).reshape(-1, i.shape[-1]) for i in routed])
    switch.policy.used(used)
    return switch.policy.coming(np.unique(used).tolist())


def _stacks(u: StreamedUnit, places: dict[tuple[int, str], int]) -> list[_Stack]:
    """Returns a unit's fields as tensors of a switch; empty if one of them is not a switch's tensor."""
    found = []
    for p, f in zip(u.layer.parameters, u.unit.fields, strict=True):
        tensor = places.get((id(p.module), p.key))
        if tensor is None:
            return []
        extent = next(e for e in u.unit.extents if e.at <= f.at and f.at + f.nbytes <= e.at + e.nbytes)
        found.append(_Stack(tensor, f.at, extent))
    return found


def _part(extent: Extent, begin: int, end: int) -> Extent:
    return Extent(extent.file, begin, end - begin, extent.at + begin - extent.offset, extent.in_place)


def _runs(slot_of: np.ndarray) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate(([0], (slot_of >= 0).astype(np.int8), [0]))))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
