"""A link over TCP.

Every pair of ranks has a connection for data, and rank 0 one with each for signs of life and values, so that a message
of gigabytes delays no heartbeat. All are authenticated when they are made (``handshake``); nothing is encrypted after
that. Over a network that others use, put the link into WireGuard or an ssh tunnel.

A run that has failed ends on all ranks: whoever waits for anything gets a ``LinkError``, and a process that has not
ended by itself after ``LinkLimits.grace`` is ended, with status 1.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress

from outcore.errors import LinkError

from .connection import Kind, LinkConnection
from .link import LinkLimits
from .meeting import CONTROL, DATA, Identity, Meeting
from .signs import LinkThread
from .verdict import Blame

SMALL = 1 << 16
"""Bytes that the caller hands to the kernel himself, where there is room for them: a thread that is to do it has to get
hold of the interpreter first, up to 5 ms (``sys.getswitchinterval``) after a caller who goes on computing."""

_COUNT = struct.Struct("!Q")


class Receive:
    """An ``Arrival``: a receive from one rank."""

    def __init__(self, thread: LinkThread, source: int, into: memoryview) -> None:
        self._thread, self._source = thread, source
        self.into, self.done = into, False

    @property
    def ready(self) -> bool:
        """Whether ``wait`` returns or raises at once."""
        return self.done or self._thread.fault is not None

    def wait(self) -> None:
        """Wait for the bytes.

        Raises:
            LinkError: the run has failed.
        """
        self._thread.wait_for(lambda: self.done, self._source, due=True)


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
        # A rank that lacks another one tells rank 0 by then, which says who did not come if nobody knows better.
        until = time.monotonic() + limits.start + (2 if self.rank else 1) * limits.verdict
        there = _met(Meeting(me, limits, listener, alone), me.rank)
        control, data = ({rank: sock for (rank, its), sock in there.items() if its == p} for p in (CONTROL, DATA))
        self._thread = LinkThread(me, limits, control, data, until, leave, alone)
        try:
            self.gather(b"")
        except BaseException:
            self.close()
            raise

    def send(self, to: int, data: memoryview) -> None:
        """As in ``Link``; what is small leaves at once."""
        self.check()
        payload = data.cast("B") if data.nbytes else memoryview(b"")
        self._thread.put(self._thread.data[to], Kind.DATA, payload, at_once=payload.nbytes <= SMALL)

    def receive(self, source: int, into: memoryview) -> Receive:
        """As in ``Link``."""
        self.check()
        arrival = Receive(self._thread, source, into.cast("B") if into.nbytes else memoryview(b""))
        posted = self._thread.data[source].posted
        posted.append(arrival)
        if len(posted) == 1:
            self._thread.wake_up()
        return arrival

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
            self._thread.tell(Kind.GATHER, _COUNT.pack(self._agreements) + value)
            return parted(self._told(Kind.GATHERED, 0))
        values = [value, *(self._in_step(rank, self._told(Kind.GATHER, rank)) for rank in range(1, self.size))]
        self._thread.tell(Kind.GATHERED, b"".join(_COUNT.pack(len(each)) + each for each in values))
        return values

    def _told(self, kind: Kind, rank: int) -> bytes:
        values = self._thread.inbox[kind, rank]
        self._thread.wait_for(lambda: values, rank, due=False)
        return values.popleft()

    def _in_step(self, rank: int, told: bytes) -> bytes:
        """A rank's value. One that has left some of what was agreed on would take it for what comes next."""
        agreements = int.from_bytes(told[: _COUNT.size])
        if agreements != self._agreements:
            why = f"is out of step: it has taken {agreements} values of {self._agreements} that were agreed on"
            self._thread.fail(Blame(rank, f"{why}; each rank has to do the same, to the same end"))
            self.check()
        return told[_COUNT.size :]

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


def _met(meeting: Meeting, rank: int) -> dict[tuple[int, str], socket.socket]:
    try:
        return meeting.meet()
    except BaseException as e:
        if isinstance(e, LinkError) and rank and (0, CONTROL) in meeting.there and e.rank is not None:
            # So that rank 0, which has met everybody, names the right one.
            told = LinkConnection(meeting.there[0, CONTROL], 0, data=False)
            told.put(Kind.FAULT, memoryview(Blame(e.rank, str(e).partition(") ")[2] or str(e)).packed()))
            with suppress(OSError):
                told.write()
        for sock in meeting.there.values():
            sock.close()
        raise


def parted(payload: bytes) -> list[bytes]:
    """Values, each behind its length."""
    values, at = [], 0
    while at < len(payload):
        end = at + _COUNT.size
        at = end + int.from_bytes(payload[at:end])
        values.append(payload[end:at])
    return values
