"""Memory for some of a layer's experts: one array a tensor, a slot of each for an expert. Bytes and files alone.

In a file an expert is a stretch of each tensor, which are stacked by expert; kernels want each tensor as one array,
too. So an expert is read in as many stretches as there are tensors, each to its slot of its array, and which expert
lies in which slot makes no difference to what is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from ..checkpoint.checkpoint import TensorInfo
from ..checkpoint.lazy_model import DTYPES
from ..disk.layout import Extent
from ..disk.ring import Slot
from ..errors import ReadError
from ..machine.device_memory import DeviceMemory, address_of, move
from ..sizes import BLOCK, round_up


@dataclass(frozen=True)
class Stacked:
    """A tensor that is stacked by expert.

    Attributes:
        info: where it lies on disk, all of it.
        dtype: what it is held in; None: as on disk.
    """

    info: TensorInfo
    dtype: mx.Dtype | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one expert."""
        return self.info.shape[1:]

    @property
    def read_bytes(self) -> int:
        """Of one expert on disk."""
        return self.info.nbytes // self.info.shape[0]

    @property
    def held_bytes(self) -> int:
        """Of one expert in memory."""
        if self.dtype is None:
            return self.read_bytes
        return self.read_bytes // DTYPES[self.info.dtype].size * self.dtype.size


def pool_bytes(tensors: Sequence[Stacked], slots: int) -> int:
    """Bytes of memory of a pool's payload."""
    return sum(round_up(slots * t.held_bytes, BLOCK) for t in tensors)


class Pool:
    """Slots for experts of one layer.

    Args:
        placed: what keeps its memory on the device, apart from the host's; None: both compute with the same memory.

    Attributes:
        arrays: (slots, *shape) of each tensor; they keep showing what is written to the slots.
    """

    def __init__(self, tensors: Sequence[Stacked], slots: int, device: str, placed: DeviceMemory | None = None) -> None:
        self.tensors = tensors
        self.slots = slots
        self._placed = placed
        self._starts: list[int] = []
        at = 0
        for t in tensors:
            self._starts.append(at)
            at += round_up(slots * t.held_bytes, BLOCK)
        self.memory = Slot(at, device if placed is None else "cpu")
        if placed is not None:
            placed.keep(address_of(self.memory.payload), len(self.memory.payload))
        base, whole = self.memory.base, self.memory.array
        self.arrays = [
            whole[base + start : base + start + slots * t.held_bytes]
            .view(t.dtype or DTYPES[t.info.dtype])
            .reshape(slots, *t.shape)
            for start, t in zip(self._starts, tensors, strict=True)
        ]
        mx.eval(self.arrays)

    def extents(self, expert: int, slot: int) -> list[Extent]:
        """What reading an expert into a slot takes, where nothing is cast."""
        found = []
        for t, start in zip(self.tensors, self._starts, strict=True):
            n = t.read_bytes
            offset, at = t.info.offset + expert * n, start + slot * n
            # Its neighbours are other experts: blocks can be read in place only where they are its own.
            in_place = self._placed is None and not (offset % BLOCK or at % BLOCK or n % BLOCK)
            found.append(Extent(t.info.file, offset, n, at, in_place=in_place))
        return found

    def place(self, tensor: int, slot: int) -> memoryview:
        """Where an expert's part of a tensor lies: for ``move`` alone, as it may be on a device."""
        n = self.tensors[tensor].held_bytes
        at = self._starts[tensor] + slot * n
        return self.memory.payload[at : at + n]

    def move(self, target: memoryview, source: memoryview) -> None:
        """Copy to, or out of, a ``place``.

        Raises:
            ReadError: the device refuses.
        """
        try:
            (move if self._placed is None else self._placed.move)(target, source)
        except OSError as e:
            raise ReadError(f"an expert could not be copied: {e}") from e

    def copy(self, other: Pool, expert_slots: Sequence[tuple[int, int]]) -> None:
        """Experts of another pool of the same layer: of each the slot there and the slot here."""
        for there, here in expert_slots:
            for n in range(len(self.tensors)):
                self.move(self.place(n, here), other.place(n, there))

    def close(self) -> None:
        """Nobody computes with it any more."""
        if self._placed is not None:
            self._placed.forget(address_of(self.memory.payload))
