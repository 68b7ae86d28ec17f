"""A link over TCP.

Every pair of ranks has a connection for data, and rank 0 one with each for signs of life and values, so that a message
of gigabytes delays no heartbeat. All are authenticated when they are made (``handshake``); nothing is encrypted after
that. Over a network that others use, put the link into WireGuard or an ssh tunnel.

A run that has failed ends on all ranks: whoever waits for anything gets a ``LinkError``, and a process that has not
ended by itself after ``LinkLimits.grace`` is ended, with status 1.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress

from outcore.errors import LinkError

from ..link_protocol import LinkLimits
from .connection import Kind
from .link_thread import LinkThread, Receive
from .meeting import Identity, Meeting
from .verdict import Blame

_COUNT = 8
"""Bytes in front of a value that is gathered: how often was agreed, and on the way back its length."""


class SocketLink:
    """One rank's side (``Link``), whose methods raise ``LinkError`` where the run has failed. Making it waits until all
    ranks are there.

    Args:
        me: who this is, and where the others are.
        listener: what others connect to; None: it is made at this rank's address.
        leave: what ends the process once the run has failed and the grace is over; None: nothing does, as for links
            that share a process.
        alone: asked each second; a reason to end, such as a launcher that is gone.

    Raises:
        LinkError: somebody did not come, or has another version.
    """

    def __init__(
        self,
        me: Identity,
        limits: LinkLimits | None = None,
        listener: socket.socket | None = None,
        leave: Callable[[int], None] | None = os._exit,
        alone: Callable[[], str | None] = lambda: None,
    ) -> None:
        self.rank, self.size, self.host = me.rank, me.size, me.names[me.rank]
        limits = limits or LinkLimits()
        self._agreements = 0  # values that were agreed on: of rank 0 that it told, of others that they took
        self._closed = False
        meeting, missed = Meeting(me, limits, listener, alone), None
        try:
            asyncio.run(meeting.meet())
        except LinkError as e:
            missed = e
        self._thread = LinkThread(me, limits, meeting.there, leave, alone)
        try:
            if missed is not None:
                # So that rank 0, which may have met everybody, names the right one.
                self._thread.fail(Blame(missed.rank or 0, str(missed).partition(") ")[2] or str(missed)))
                raise missed
            self.gather(b"")
        except BaseException:
            self.close()
            raise

    def send(self, to: int, data: memoryview) -> None:
        """As in ``Link``; what is small leaves at once."""
        self.check()
        self._thread.put(self._thread.data[to], Kind.DATA, _flat(data))

    def receive(self, source: int, into: memoryview) -> Receive:
        """As in ``Link``."""
        self.check()
        return self._thread.receive(source, _flat(into))

    def agree(self, value: bytes) -> bytes:
        """Rank 0's value. Rank 0 waits for nobody."""
        self.check()
        self._agreements += 1
        if self.rank:
            return self._told(Kind.AGREE, 0)
        self._thread.tell(Kind.AGREE, value)
        return value

    def gather(self, value: bytes) -> list[bytes]:
        """Everybody's value, by rank."""
        self.check()
        if self.rank:
            self._thread.tell(Kind.GATHER, self._agreements.to_bytes(_COUNT) + value)
            return _parted(self._told(Kind.GATHER, 0))
        values = [value, *(self._in_step(rank, self._told(Kind.GATHER, rank)) for rank in range(1, self.size))]
        self._thread.tell(Kind.GATHER, b"".join(len(each).to_bytes(_COUNT) + each for each in values))
        return values

    def _told(self, kind: Kind, rank: int) -> bytes:
        values = self._thread.inbox[kind, rank]
        self._thread.wait_for(lambda: values, rank, due=False)
        return values.popleft()

    def _in_step(self, rank: int, told: bytes) -> bytes:
        """A rank's value. One that has left some of what was agreed on would take it for what comes next."""
        agreements = int.from_bytes(told[:_COUNT])
        if agreements != self._agreements:
            why = f"is out of step: it has taken {agreements} values of {self._agreements} that were agreed on"
            self._thread.fail(Blame(rank, f"{why}; each rank has to do the same, to the same end"))
            self.check()
        return told[_COUNT:]

    def working(self) -> AbstractContextManager[None]:
        """As in ``Link``."""
        return self._thread.movement.working()

    def check(self) -> None:
        """Look whether the run goes on."""
        self._thread.movement.note()
        self._thread.check()

    def flush(self) -> None:
        """Wait until what was queued is the kernel's."""
        for rank, each in self._thread.data.items():
            self._thread.wait_for(lambda leaving=each.leaving: not leaving, rank, due=True)  # type: ignore[misc]

    def fail(self, reason: str) -> None:
        """End the run on all ranks: this one cannot go on. Nothing of one whose part is over."""
        if not self._closed:
            self._thread.fail(Blame(self.rank, reason))

    def close(self) -> None:
        """Send what was queued, and end this rank's part. Ranks that still wait for it fail then."""
        if not self._closed:
            self._closed = True
            try:
                with suppress(LinkError):
                    self.flush()
            finally:
                self._thread.close()


def _flat(data: memoryview) -> memoryview:
    return data.cast("B") if data.nbytes else memoryview(b"")


def _parted(payload: bytes) -> list[bytes]:
    """Values, each behind its length."""
    values = []
    while payload:
        end = _COUNT + int.from_bytes(payload[:_COUNT])
        values.append(payload[_COUNT:end])
        payload = payload[end:]
    return values
