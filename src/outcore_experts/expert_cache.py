"""The expert cache of one layer, and the reads that fill it.

Kernels want each tensor of all experts as one array, and files store it so. So the cache has one array for each tensor,
with a slot for each cached expert. An expert is read in as many pieces as there are tensors, each into its slot of an
array. Which slot an expert is in makes no difference to results.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from outcore.checkpoint.checkpoint import TensorInfo
from outcore.checkpoint.lazy_model import DTYPES
from outcore.disk.layout import Extent
from outcore.disk.metrics import Metrics
from outcore.disk.reader import Read, Reader
from outcore.disk.ring import Slot
from outcore.engine.layer_sizes import Place
from outcore.errors import ReadError
from outcore.machine.allocator import address_of, move
from outcore.modules.hooks import absent, put
from outcore.modules.layers import Layer, Parameter
from outcore.sizes import BLOCK, round_up

from .device_stretches import DeviceMemory
from .expert_plan import room_for
from .expert_policy import ExpertPolicy, Load
from .switches import Switch

# How many experts are read at a time if they are cast before they are copied into the cache.
STAGED = 8


@dataclass(frozen=True)
class Stacked:
    """A tensor that is stacked by expert. ``read_bytes`` on disk and ``held_bytes`` in memory are those of one expert.

    Attributes:
        info: location of the whole tensor on disk.
        dtype: dtype in memory; None: as on disk.
    """

    info: TensorInfo
    dtype: mx.Dtype | None = None

    @property
    def read_bytes(self) -> int:
        return self.info.nbytes // self.info.shape[0]

    @property
    def held_bytes(self) -> int:
        if self.dtype is None:
            return self.read_bytes
        return self.read_bytes // DTYPES[self.info.dtype].size * self.dtype.size


def stacked(layer: Layer, switch: Switch, casts: Sequence[mx.Dtype | None], place: Place) -> list[Stacked]:
    return [Stacked(place.where[f"{layer.path}.{layer.parameters[n].path}"], casts[n]) for n in switch.streamed]


@dataclass(frozen=True)
class SwitchUnit:
    """A layer's switch and the location of its experts.

    Attributes:
        name: the layer's name, for messages.
        parameters: those that the cache replaces, in the order of ``tensors``.
        used: number of experts that a token uses.
        block: the module that contains the router and calls the switch; None: it is the layer itself.
    """

    name: str
    switch: Switch
    parameters: tuple[Parameter, ...]
    tensors: tuple[Stacked, ...]
    used: int
    block: nn.Module | None = None

    @property
    def cast(self) -> bool:
        return any(t.dtype is not None for t in self.tensors)


@dataclass
class Shared:
    """Memory that a ring's slot has behind the units of other weights; layers without a cache of their own take turns
    with it. Fields as in ``Slot``; ``owner``: whose experts are there now."""

    array: mx.array
    base: int
    payload: memoryview
    owner: CachedSwitch | None = None


class ExpertCache:
    """Slots for experts of one layer. ``placed`` keeps them on a device that does not share the host's memory.
    ``memory``: where they are; None: in memory of their own.

    Attributes:
        arrays: (slots, *shape of an expert) for each tensor; views of the slots' memory.
    """

    def __init__(
        self,
        tensors: Sequence[Stacked],
        slots: int,
        device: str,
        placed: DeviceMemory | None = None,
        memory: Shared | None = None,
    ) -> None:
        self.tensors, self._placed = tensors, placed if memory is None else None
        self._starts, end = list[int](), 0
        for t in tensors:
            self._starts.append(end)
            end += round_up(slots * t.held_bytes, BLOCK)
        self.memory = memory or Slot(end, device if self._placed is None else "cpu")
        if self._placed is not None and placed is not None:
            placed.keep(address_of(self.memory.payload), len(self.memory.payload))
        base, whole = self.memory.base, self.memory.array
        self.arrays = [
            whole[base + start : base + start + slots * t.held_bytes]
            .view(t.dtype or DTYPES[t.info.dtype])
            .reshape(slots, *t.info.shape[1:])
            for start, t in zip(self._starts, tensors, strict=True)
        ]
        mx.eval(self.arrays)

    def extents(self, expert: int, slot: int) -> list[Extent]:
        """Returns the reads that bring an expert into a slot. Not for experts that are cast."""
        found = []
        for t, start in zip(self.tensors, self._starts, strict=True):
            n = t.read_bytes
            offset, at = t.info.offset + expert * n, start + slot * n
            # Other experts precede and follow it, so it is read in place only if it consists of whole blocks.
            in_place = self._placed is None and not (offset % BLOCK or at % BLOCK or n % BLOCK)
            found.append(Extent(t.info.file, offset, n, at, in_place=in_place))
        return found

    def place(self, tensor: int, slot: int) -> memoryview:
        """Returns the memory of one tensor's part in a slot. It may be on the device, so use it only with ``move``."""
        n = self.tensors[tensor].held_bytes
        at = self._starts[tensor] + slot * n
        return self.memory.payload[at : at + n]

    def move(self, target: memoryview, source: memoryview) -> None:
        try:
            (move if self._placed is None else self._placed.move)(target, source)
        except OSError as e:
            raise ReadError(f"an expert could not be copied: {e}") from e

    def close(self) -> None:
        if self._placed is not None:
            self._placed.forget(address_of(self.memory.payload))


class CachedSwitch:
    """A switch with its cache.

    Attributes:
        table: uint32 (experts,), the slot of each expert; meaningless for an expert that is not cached.
        last: the latest results computed from the cache, which may not be evaluated yet.
        filling: reads that copy experts out of the cache and may be running.
        arriving: prefetched experts that have slots; their reads may be running.
        stays: whether the cache has all experts and its arrays are the switch's weights.
        entered: whether the switch is being called.
    """

    def __init__(
        self,
        unit: SwitchUnit,
        slots: int,
        table: mx.array,
        inside: mx.array,
        device: str,
        placed: DeviceMemory | None = None,
    ) -> None:
        self.unit, self._device, self._placed = unit, device, placed
        self.last: list[mx.array] = []
        self.filling: list[Read] = []
        self.arriving: dict[int, Read] = {}
        self.policy = ExpertPolicy(unit.switch.experts, slots)
        self.cache = ExpertCache(unit.tensors, slots, device, placed)
        self.table, self._inside, self.stays = table, inside, False
        self.entered = False
        self._absent = absent(self.cache.arrays)
        # The switch's resident parameters by expert, while ``in_place`` has replaced them.
        self._own: list[mx.array] | None = None
        mx.eval(table, inside)
        self._slots, self._experts = np.array(table, copy=False), np.array(inside, copy=False)

    def use(self, tokens: npt.NDArray[np.int64]) -> set[int]:
        """Counts the use of experts, int64 (tokens, experts per token), in the tokens' order. Returns the set of
        experts."""
        self.policy.used(tokens)
        return set(tokens.ravel().tolist())

    def free(self) -> None:
        for read in self.filling:
            read.ended()
        self.filling = []

    def settle(self) -> None:
        """Waits until nothing computes with the cache, or copies out of it or into it."""
        mx.eval(self.last)
        self.last = []
        self.free()
        self.arrived(self.arriving)

    @property
    def shared(self) -> Shared | None:
        """The memory that the cache shares with other layers' caches; None: it has its own."""
        return self.cache.memory if isinstance(self.cache.memory, Shared) else None

    def lend(self, shared: Shared | None) -> None:
        """Takes turns with other layers in this memory from now on; None: there is none yet."""
        self.settle()
        room = 0 if shared is None else len(shared.payload)
        each, tensors = sum(t.held_bytes for t in self.unit.tensors), len(self.unit.tensors)
        slots = min(self.unit.switch.experts - 1, room_for(room, each, tensors))
        self.policy = self.policy.resized(slots)[0]
        self.cache.close()
        self.cache = ExpertCache(self.unit.tensors, slots, self._device, memory=shared if slots else None)

    def come(self) -> None:
        """Makes the shared memory this layer's."""
        if (shared := self.shared) is not None and shared.owner is not self:
            if shared.owner is not None:
                shared.owner.leave()
            shared.owner = self

    def leave(self) -> None:
        """Leaves the shared memory to others, once nothing computes with it or reads into it."""
        if (shared := self.shared) is not None and shared.owner is self:
            self.settle()
            shared.owner = None
            self.policy.vacate(range(self.policy.slots))

    def arrived(self, experts: Iterable[int], *, cancel: bool = False) -> None:
        """Waits for those of ``experts`` that are being prefetched; ``cancel`` drops reads that have not begun. An
        expert that could not be read leaves the cache."""
        mine = [(e, self.arriving[e]) for e in list(experts) if e in self.arriving]
        for _, read in mine:
            if cancel:
                read.cancel()
        for e, read in mine:
            read.ended()
            del self.arriving[e]
            if read.error is not None:
                self.policy.vacate([int(self.policy.slot_of[e])])

    def place(self, loads: Sequence[Load]) -> None:
        self.policy.placed(loads)
        self._slots[:] = np.maximum(self.policy.slot_of, 0)
        self._experts[: self.policy.slots] = np.maximum(self.policy.expert_in, 0)

    def withdraw(self) -> None:
        self.stays = False
        put(self.unit.parameters, self._absent)
        if self._own is not None:
            put(self.unit.switch.held, self._own)
            self._own = None

    def stay(self) -> None:
        """Makes the cache, which holds all experts, the switch's weights until ``withdraw``."""
        put(self.unit.parameters, self.cache.arrays)
        self.stays = True

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Makes the cache's arrays the switch's weights inside the context.

        Parameters by expert that stay in memory (``held``) are gathered by slot in the graph, like the table, because
        the slots' experts are not known yet when the graph is built.
        """
        self._own = [p.array for p in self.unit.switch.held]
        experts = self._inside[: self.policy.slots]
        try:
            put(self.unit.parameters, self.cache.arrays)
            put(self.unit.switch.held, [own[experts] for own in self._own])
            yield
        finally:
            self.withdraw()

    def resize(self, slots: int) -> None:
        if slots == self.policy.slots and self.shared is None:
            return
        self.settle()
        self.leave()
        if self.stays:
            self.withdraw()
        policy, moves = self.policy.resized(slots)
        cache = ExpertCache(self.unit.tensors, slots, self._device, self._placed)
        for expert, slot in moves:
            for n in range(len(self.unit.tensors)):
                cache.move(cache.place(n, slot), self.cache.place(n, int(self.policy.slot_of[expert])))
        self.cache.close()
        self.policy, self.cache = policy, cache
        self.place(moves)


class ExpertReads:
    """Reads experts into the caches of a model. ``expert_s``: mean seconds per expert that the host waited for."""

    def __init__(self, metrics: Metrics, device: str) -> None:
        self.reader: Reader | None = None
        self.expert_s: float | None = None
        self._metrics, self._device = metrics, device
        self._staging: Slot | None = None

    def bring(self, switch: CachedSwitch, loads: Sequence[Load], wanted: Iterable[int] = ()) -> None:
        """Reads ``loads`` into their slots. Waits for these, and for those of ``wanted`` that are being prefetched."""
        began = self._metrics.clock()
        if loads:
            self._empty(switch, loads)
            if switch.unit.cast:
                for n in range(0, len(loads), STAGED):
                    self._stage(switch, loads[n : n + STAGED])
            else:
                self._read([self._begin(switch, load) for load in loads])
            switch.place(loads)
            each = (self._metrics.clock() - began) / len(loads)
            self.expert_s = each if self.expert_s is None else self.expert_s + (each - self.expert_s) / 16
        prefetched = [(e, int(switch.policy.slot_of[e])) for e in wanted if e in switch.arriving]
        if prefetched:
            switch.arrived([e for e, _ in prefetched])
            lost = [(e, slot) for e, slot in prefetched if switch.policy.slot_of[e] < 0]
            if lost:
                self.bring(switch, lost)
        if loads or prefetched:
            self._metrics.stall_s += self._metrics.clock() - began

    def prefetch(self, switch: CachedSwitch, loads: Sequence[Load]) -> None:
        mx.eval(switch.last)
        switch.last = []
        self._empty(switch, loads)
        for load in loads:
            switch.arriving[load[0]] = self._begin(switch, load)
        switch.place(loads)

    def _empty(self, switch: CachedSwitch, loads: Sequence[Load]) -> None:
        switch.free()
        switch.come()
        switch.arrived({int(switch.policy.expert_in[slot]) for _, slot in loads}, cancel=True)
        # Until all bytes have arrived the slots count as empty, so that a failed read is never used.
        switch.policy.vacate([slot for _, slot in loads])

    def _begin(self, switch: CachedSwitch, load: Load) -> Read:
        return self._submit(switch, load[0], switch.cache.extents(*load), switch.cache.memory.payload)

    def _submit(self, switch: CachedSwitch, expert: int, extents: Sequence[Extent], target: memoryview) -> Read:
        assert self.reader is not None
        return self.reader.submit(f"{switch.unit.name}, expert {expert}", extents, target)

    def _read(self, reads: Sequence[Read]) -> None:
        try:
            for read in reads:
                read.ended()
        except BaseException:
            for read in reads:
                read.cancel()
            for read in reads:
                read.wait_quietly()
            raise
        for read in reads:
            read.wait()

    def _stage(self, switch: CachedSwitch, loads: Sequence[Load]) -> None:
        """Reads experts into a staging slot, casts them, and copies them into the cache."""
        tensors, starts, end = switch.unit.tensors, list[int](), 0
        for t in tensors:
            starts.append(end)
            end += round_up(t.read_bytes * STAGED, BLOCK)
        if self._staging is None or len(self._staging.payload) < end:
            self._staging = None
            self._staging = Slot(end, self._device)
        slot, reads = self._staging, []
        for n, (expert, _) in enumerate(loads):
            extents = [
                Extent(t.info.file, t.info.offset + expert * t.read_bytes, t.read_bytes, start + n * t.read_bytes)
                for t, start in zip(tensors, starts, strict=True)
            ]
            reads.append(self._submit(switch, expert, extents, slot.payload))
        self._read(reads)
        for i, (t, start) in enumerate(zip(tensors, starts, strict=True)):
            begin = slot.base + start
            raw = slot.array[begin : begin + len(loads) * t.read_bytes].view(DTYPES[t.info.dtype])
            cast = np.array((raw if t.dtype is None else raw.astype(t.dtype)).view(mx.uint8), copy=False).data
            for n, (_, place) in enumerate(loads):
                switch.cache.move(switch.cache.place(i, place), cast[n * t.held_bytes : (n + 1) * t.held_bytes])
