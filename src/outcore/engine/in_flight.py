"""What was handed to the device and is not known to be done: after it the slots that it reads are given back."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable

import mlx.core as mx

from ..disk.metrics import Metrics
from ..disk.ring import Lease, Ring
from ..machine.allocator import note_held
from .transport import Transport

LAG = 1
"""Streamed units that may be under way on the device when the next is handed over."""


class InFlightQueue:
    """Units' work on the device, oldest first.

    Args:
        transport: to other ranks, which are told while the device may be waited for.

    Attributes:
        ring: whose slots are given back; another may be set while nothing is under way.
        done: called with a unit's lease when it is computed, and its slot still holds it.
        settled: when the last unit was seen to be done, by the clock of ``metrics``; 0 before the first. ``waited_s``:
            seconds for which other ranks had been waited for by then.
    """

    def __init__(self, ring: Ring, metrics: Metrics, transport: Transport) -> None:
        self.ring = ring
        self.done: Callable[[Lease], None] | None = None
        self.settled = self.waited_s = 0.0
        self._metrics, self._transport = metrics, transport
        self._pending: deque[tuple[Lease, list[mx.array], float]] = deque()

    def arrive(self, lease: Lease) -> None:
        """Wait for the unit's bytes to be in its slot."""
        if lease.read.ready:
            lease.read.wait()
            return
        # Waiting for the disk anyway: the slot that is being computed from may as well be read into next.
        self.drain()
        self.ring.wait(lease)

    def hand_over(self, lease: Lease, arrays: list[mx.array]) -> None:
        """Have the device compute ``arrays``: all that is derived from the lease's slot."""
        self._pending.append((lease, arrays, self._metrics.clock()))
        with self._transport.working():
            mx.async_eval(arrays)
        note_held()

    def lag(self) -> None:
        """Wait for all but the last ``LAG`` units."""
        while len(self._pending) > LAG:
            self._drain_one()

    def drain(self) -> None:
        """Wait for all that was handed to the device, and give its slots back for reading ahead."""
        while self._pending:
            self._drain_one()

    def settle(self) -> None:
        """What was handed over is done by now."""
        self.settled, self.waited_s = self._metrics.clock(), self._metrics.ranks_s

    def _drain_one(self) -> None:
        lease, arrays, handed = self._pending[0]
        with self._transport.working():
            mx.eval(arrays)
        note_held()
        self._pending.popleft()
        self._metrics.note("compute", self.ring.units[lease.unit].name, max(handed, self.settled))
        self.settle()
        if self.done is not None:
            self.done(lease)
        self.ring.release(lease)

    def abandon(self) -> None:
        """After something failed: wait for what still computes, whatever becomes of it. The ring keeps the slots."""
        for _, arrays, _ in self._pending:
            with contextlib.suppress(RuntimeError):
                mx.eval(arrays)
        self._pending.clear()
