"""The ring: a few long-lived slots that streamed units are read into, in the order of their use.

Slots are used strictly in turn: the n-th unit of the run lies in slot n modulo the number of slots. So a unit's slot is
known in advance, and its graph can be built while its weights are still being read. The ring learns the order of units:
it prefetches in the order of the pass before, across the token boundary too. A unit that comes out of order is read on
demand, which is slower but never wrong.

Only one thread at a time may call methods. The reader's threads run concurrently, but only write bytes into slots.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from ..disk.layout import Extent, SlotCopy, Unit
from ..errors import BudgetError, ClosedError
from ..machine.allocator import prepare_slot
from ..machine.device import most_slot_bytes
from ..sizes import format_size, slot_alignment, slot_bytes
from .metrics import Metrics
from .reader import Read, Reader


class Slot:
    """One MLX buffer of at least ``nbytes`` payload bytes that is written in place.

    Attributes:
        array: uint8 array of the whole buffer.
        base: start of the payload in ``array``; its address is a multiple of ``slot_alignment(nbytes)``.
        payload: writable view of the payload.

    Raises:
        BudgetError: the device makes no buffer of that size.
    """

    def __init__(self, nbytes: int, device: str = "cpu") -> None:
        size, step = slot_bytes(nbytes), slot_alignment(nbytes)
        if size > (most := most_slot_bytes()):
            what = (
                f"a slot of {format_size(size)} cannot be made: this device's buffers hold {format_size(most)} at most"
            )
            raise BudgetError(f"{what}; keep that unit in memory")
        self.array = mx.zeros((size,), dtype=mx.uint8)
        mx.eval(self.array)
        # MLX documents that this NumPy array has the MLX array's own buffer, not a copy.
        view = np.array(self.array, copy=False)
        address = view.ctypes.data
        self.base = -address % step
        self.payload = view.data[self.base : self.base + size - step]
        prepare_slot(address + self.base, size - step, device)


@dataclass(frozen=True)
class Partly:
    """What to read and what to copy for a unit that is partly in memory. ``begun`` is called with the read."""

    extents: Sequence[Extent]
    copies: Sequence[SlotCopy]
    begun: Callable[[Read], None]


@dataclass
class Lease:
    turn: int
    unit: int
    slot: int
    read: Read


class Ring:
    """Slots in cyclic use, with the reads that run ahead of the compute.

    Args:
        units: every unit that may be requested, by index.
        slots: number of slots, at least 2.
        order: the expected order of units in the first pass.
        least: bytes of a slot, at least.

    Attributes:
        ahead: prefetched turns, not yet taken; ``held``: turns taken and not released. Other threads may look at both.
        partly: called with a unit's index; returns ``Partly`` for a unit that is partly in memory, else None.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        reader: Reader,
        *,
        slots: int,
        order: Sequence[int],
        metrics: Metrics | None = None,
        device: str = "cpu",
        least: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if slots < 2:
            raise ValueError("a ring needs at least 2 slots: one to compute from and one to read into")
        self.units = units
        self.reader = reader
        self.metrics = metrics or Metrics()
        self.partly: Callable[[int], Partly | None] | None = None
        largest = max(least, *(u.slot_bytes for u in units))
        self.slots = [Slot(largest, device) for _ in range(slots)]
        self._clock = clock
        self._order = list(order)
        self._seen: list[int] = []  # the units of this pass so far
        self._before: list[int] = []  # the units of the pass before
        self._at = 0  # the next unit's place in the order
        self._turn = 0  # the next turn to be taken
        self.ahead: list[Lease] = []
        self.held: dict[int, Lease] = {}
        self._closed = False
        self._broken = False  # ``abandon`` was called: held turns will not be released

    def begin_pass(self) -> None:
        """Begin a pass over the units; prefetch from now on in the order of the pass before."""
        if self._closed:
            self._check_open()
        if self._broken:
            self._recover()
        # A pass that lacks units has probably stopped half-way: its order is used only if two passes have it.
        whole = set(self._order) <= set(self._seen)
        if self._seen and self._seen != self._order and (whole or self._seen == self._before):
            self._order, self._at = self._seen.copy(), 0
        self._before, self._seen = self._seen, []

    def reorder(self, order: Sequence[int]) -> None:
        """Replace the expected order of units, between passes. Keeps prefetched units that this order begins with.
        Without units nothing is read ahead."""
        self._check_open()
        fits = [bool(order) and lease.unit == order[n % len(order)] for n, lease in enumerate(self.ahead)]
        self._drop(fits.index(False) if False in fits else len(fits))
        self._order, self._at = list(order), 0
        self._seen, self._before = [], []
        self.start()

    def take(self, unit: int) -> Lease:
        """Take the next turn for ``unit``. Its bytes may not be in the slot yet: ``wait`` waits for them."""
        if self._closed:
            self._check_open()
        if self._turn - len(self.slots) in self.held:  # the last turn of this slot
            raise RuntimeError("every slot of the ring is held; release one first")
        if unit != (self.ahead[0].unit if self.ahead else self._order[self._at]):
            self._miss(unit)
        lease = self.ahead.pop(0) if self.ahead else self._begin(unit, 0)
        if lease.read.error is not None and lease.read.ready:
            # The prefetch failed some time ago; the error may have passed, so read once more.
            lease = self._begin(unit, 0)
        self.held[lease.turn] = lease
        self._turn += 1
        self._at = (self._at + 1) % len(self._order)
        self._seen.append(unit)
        self.metrics.units += 1
        return lease

    def again(self, lease: Lease) -> None:
        """Read the unit of a taken turn again, because other parts of it are in memory than when its read began."""
        lease.read.cancel()
        lease.read.ended()
        lease.read = self._begin(lease.unit, lease.turn - self._turn).read

    def abandon(self) -> None:
        """Cancel a pass that failed. Its turns will not be released; the next ``begin_pass`` frees all slots.

        Does not wait, since a read may hang; ``begin_pass`` waits for the reads to end before it reuses their slots.
        """
        self._broken = True
        for lease in [*self.held.values(), *self.ahead]:
            lease.read.cancel()

    def _recover(self) -> None:
        for lease in [*self.held.values(), *self.ahead]:
            lease.read.ended()
        self.held.clear()
        self.ahead.clear()
        self._broken, self._at = False, 0
        self._seen, self._before = [], []
        self.start()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this model was closed; load it again")

    @property
    def next_slot(self) -> int:
        """The slot of the next turn; those of later turns follow in cyclic order."""
        return self._turn % len(self.slots)

    def _miss(self, unit: int) -> None:
        self.metrics.misses += 1
        self._drop(0)
        n = len(self._order)
        ahead = next((i for i in range(n) if self._order[(self._at + i) % n] == unit), None)
        if ahead is None:
            self._order.insert(self._at, unit)
        else:
            self._at = (self._at + ahead) % n

    def _drop(self, keep: int) -> None:
        dropped = self.ahead[keep:]
        for lease in dropped:
            lease.read.cancel()
        for lease in dropped:
            lease.read.wait_quietly()
        del self.ahead[keep:]

    def _begin(self, unit: int, ahead: int) -> Lease:
        turn = self._turn + ahead
        slot = turn % len(self.slots)
        u, partly = self.units[unit], None if self.partly is None else self.partly(unit)
        extents, copies = (u.extents, ()) if partly is None else (partly.extents, partly.copies)
        read = self.reader.submit(u.name, extents, self.slots[slot].payload, copies)
        if partly is not None:
            partly.begun(read)
        return Lease(turn, unit, slot, read)

    def start(self) -> None:
        """Prefetch into all free slots, also before the first unit is requested."""
        while self._order and len(self.ahead) + len(self.held) < len(self.slots):
            ahead = len(self.ahead)
            unit = self._order[(self._at + ahead) % len(self._order)]
            if self._turn + ahead - len(self.slots) in self.held:
                return
            self.ahead.append(self._begin(unit, ahead))

    def wait(self, lease: Lease) -> None:
        """Wait until the unit's bytes are in its slot.

        Raises:
            ReadError: a file is missing or too short, or the disk failed.
        """
        if not lease.read.ready:
            began = self._clock()
            lease.read.ended()
            self.metrics.stall_s += self._clock() - began
        lease.read.wait()

    def release(self, lease: Lease) -> None:
        """Return the slot to the ring: nothing reads it any more, so the next unit may be read into it."""
        self.held.pop(lease.turn, None)
        if not self._closed and not self._broken:
            self.start()

    def close(self, reader: bool = True) -> None:
        """Cancel the reads and free the slots. Safe to call twice.

        Args:
            reader: close the reader too; otherwise (between passes) it stays open for another ring.
        """
        if not self._closed:
            self._closed = True
            if not reader:
                self._drop(0)
            else:
                for lease in self.ahead:
                    lease.read.cancel()
                self.reader.close()
            for each in (self.ahead, self.held, self.slots):
                each.clear()
