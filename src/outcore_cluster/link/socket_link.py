"""A link over TCP.

Each pair of ranks has a connection for messages. Rank 0 has another one with each rank for control frames (heartbeats,
values, verdicts), so that a message of gigabytes delays no heartbeat. Strangers are kept out (``meeting``), but nothing
is encrypted: in a network that others use, put the link into WireGuard or an ssh tunnel.

Each rank tells rank 0 every second which rank it waits for; rank 0 decides which rank is at fault and tells all others.
So if a rank dies, all ranks report that one, not a rank that ended because of it.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import socket
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from outcore.errors import LinkError
from outcore.machine import interrupts
from outcore.text import one_line, printable

from ..link_protocol import LinkLimits
from .connection import Kind, LinkConnection
from .meeting import DATA, Identity, Meeting
from .verdict import DEVICE, GONE, Blame, Movement, Sign, broke, silent, stuck

# Bytes in front of a gathered value, for the number of agreed values that the sender has taken.
COUNT = 8
# Seconds after which a main thread that waits handles signals.
POLL_S = 0.05
# Seconds to wait for a verdict after a connection for messages broke, before the rank at its other end is blamed.
REPORT_S = 0.2


@dataclass
class Peer:
    """A rank with which this one exchanges control frames: any other rank for rank 0, rank 0 for the others."""

    control: LinkConnection
    heard_at: float
    sign: Sign = field(default_factory=Sign)
    ended: bool = False  # its part is done: it sent ``BYE``
    gone: bool = False  # its control connection has ended, so nothing is sent to it
    values: defaultdict[Kind, deque[bytes]] = field(default_factory=lambda: defaultdict(deque))


@dataclass
class Receive:
    """A posted receive (``Arrival``) of the ``number``-th message of a connection."""

    link: SocketLink
    source: LinkConnection
    number: int

    @property
    def ready(self) -> bool:
        return self.source.received >= self.number or self.link.fault is not None

    def wait(self) -> None:
        self.link.wait_for(lambda: self.source.received >= self.number, self.source.rank, due=True)


class SocketLink:
    """One rank's link (``Link``). The constructor returns when all ranks are connected. It and all methods raise
    ``LinkError`` once the run has failed.

    Args:
        listener: the socket that other ranks connect to; None: the constructor makes one at this rank's address.
        leave: ends the process ``LinkLimits.grace`` seconds after the run has failed; None: the process goes on.
        alone: called every second; returns a reason to end the run, such as a launcher that has ended, or None.
    """

    def __init__(
        self,
        me: Identity,
        limits: LinkLimits | None = None,
        listener: socket.socket | None = None,
        leave: Callable[[int], None] | None = os._exit,
        alone: Callable[[], str | None] = lambda: None,
    ) -> None:
        self.rank, self.size, self.host = me.rank, len(me.addresses), me.names[me.rank]
        self._me, self._limits, self._leave = me, limits or LinkLimits(), leave
        self.fault: LinkError | None = None
        self._told = self._closed = False  # whether an exception has reported the fault; whether ``close`` was called
        self._closing, self._changed = threading.Event(), threading.Condition()
        self._agreements = 0  # number of ``agree`` calls so far
        self._movement = Movement(self._limits.computing)
        self.working = partial(self._movement.waiting, DEVICE, due=False)
        self._peers: dict[int, Peer] = {}
        self._data: dict[int, LinkConnection] = {}
        meeting, missed = Meeting(me, self._limits, listener, alone), None
        try:
            asyncio.run(meeting.meet())
        except LinkError as e:
            missed = e
        first = time.monotonic() + self._limits.start - self._limits.silence  # others may still be connecting
        for (rank, purpose), sock in meeting.there.items():
            if purpose == DATA:
                self._data[rank] = LinkConnection(sock, rank, None, self._moved, self._lost)
            else:
                self._peers[rank] = Peer(LinkConnection(sock, rank, self._take, self._moved, self._lost), first)
        for connection in (*self._data.values(), *(peer.control for peer in self._peers.values())):
            connection.reader.start()
        threading.Thread(target=self._beat, args=(alone,), name="outcore-link-beat", daemon=True).start()
        try:
            if missed is not None:
                # Rank 0 may be connected to all ranks; tell it which rank this one misses.
                self._blame(Blame(missed.rank or 0, str(missed).partition(") ")[2] or str(missed)))
                raise missed
            self.gather(b"")
        except BaseException:
            self.close()
            raise

    def send(self, to: int, data: memoryview) -> None:
        self.check()
        self._data[to].put(Kind.DATA, data)

    def receive(self, source: int, into: memoryview) -> Receive:
        self.check()
        return Receive(self, self._data[source], self._data[source].post(into))

    def agree(self, value: bytes) -> bytes:
        self.check()
        self._agreements += 1
        if self.rank:
            return self._value(Kind.AGREE, 0)
        self._tell(Kind.AGREE, value)
        return value

    def gather(self, value: bytes) -> list[bytes]:
        self.check()
        if self.rank:
            self._tell(Kind.GATHER, self._agreements.to_bytes(COUNT) + value)
            return [self._value(Kind.GATHER, 0) for _ in range(self.size)]
        values = [value]
        for rank in range(1, self.size):
            given = self._value(Kind.GATHER, rank)
            if (agreements := int.from_bytes(given[:COUNT])) != self._agreements:
                # That rank would take an earlier agreed value for the next one.
                why = f"is out of step: it has taken {agreements} values of {self._agreements} that were agreed on"
                self._blame(Blame(rank, f"{why}; each rank has to do the same, to the same end"))
                self.check()
            values.append(given[COUNT:])
        for each in values:
            self._tell(Kind.GATHER, each)
        return values

    def check(self) -> None:
        if self.fault is not None:
            self._told = True
            raise LinkError(str(self.fault), self.fault.rank)  # a new exception, as a traceback grows with each raise

    def flush(self) -> None:
        """Waits until the kernel has taken all queued messages."""
        for rank, each in self._data.items():
            self.wait_for(lambda leaving=each.leaving: not leaving, rank, due=True)  # type: ignore[misc]

    def fail(self, reason: str) -> None:
        """Ends the run on all ranks, unless this rank's part is over."""
        if not self._closed:
            self._blame(Blame(self.rank, reason))

    def close(self) -> None:
        """Sends what is queued, and ends this rank's part. Ranks that still wait for this one fail."""
        if self._closed:
            return
        self._closed = True
        try:
            with suppress(LinkError):
                self.flush()
        finally:
            self._closing.set()
            self._tell(Kind.BYE)
            peers = self._peers.values()
            with self._changed:
                self._changed.wait_for(lambda: self.fault or all(peer.gone for peer in peers), self._limits.grace)
            for connection in (*self._data.values(), *(peer.control for peer in peers)):
                connection.close()

    def wait_for(self, done: Callable[[], object], rank: int, due: bool) -> None:
        """Waits until ``done()``, for something that ``rank`` sends. Heartbeats tell the other ranks about the wait.

        Args:
            due: whether only work of that rank can end the wait, so that it is blamed if it is idle.
        """
        with self._movement.waiting(rank, due):
            while True:
                ended = not due and self._peers[rank].ended  # if so, all that it sent has arrived
                with self._changed:
                    if not done() and self.fault is None and not ended:
                        self._changed.wait(POLL_S)
                    if done():
                        return
                if ended:
                    self._blame(Blame(rank, GONE))
                self.check()
                interrupts.check()

    def _value(self, kind: Kind, rank: int) -> bytes:
        values = self._peers[rank].values[kind]
        self.wait_for(lambda: values, rank, due=False)
        return values.popleft()

    def _tell(self, kind: Kind, payload: bytes = b"") -> None:
        for peer in self._peers.values():
            if not peer.gone:
                peer.control.put(kind, memoryview(payload))

    def _blame(self, blame: Blame) -> None:
        """Ends the run for a rank's fault. Rank 0 decides which rank that is, or this one if it cannot ask rank 0."""
        if self.rank == 0 or blame.rank == 0 or all(peer.gone for peer in self._peers.values()):
            self._decide(blame)
        else:
            self._tell(Kind.BLAME, json.dumps(blame).encode())

    def _decide(self, blame: Blame) -> None:
        with self._changed:
            if self.fault is not None or self._closing.is_set():
                return
            self._tell(Kind.BLAME, json.dumps(blame).encode())  # before the main thread sees the fault and ends
            self.fault = LinkError(f"{self._me.who(blame.rank)}: {blame.what}", blame.rank)
            self._changed.notify_all()
        if self._leave is not None:
            threading.Thread(target=self._end, args=(self._leave,), name="outcore-link-end", daemon=True).start()

    def _end(self, leave: Callable[[int], None]) -> None:
        """Ends the process if the main thread does not: it may be in a C call that no exception interrupts."""
        time.sleep(self._limits.grace)
        line = f"{printable(f'outcore: {self.fault}')}\n".encode(errors="backslashreplace")
        # Not by ``sys.stderr``, which may be locked for ever; and only if somebody reads standard error.
        if not self._told and select.select([], [2], [], 0.5)[1]:
            os.write(2, line)
        leave(1)

    def _beat(self, alone: Callable[[], str | None]) -> None:
        while True:
            sign = self._movement.look()
            self._tell(Kind.BEAT, json.dumps(sign).encode())
            peers = {rank: peer for rank, peer in self._peers.items() if not peer.gone}
            heard = {rank: peer.heard_at for rank, peer in peers.items()}
            reason, found = alone(), silent(heard, time.monotonic(), self._limits.silence)
            blame = Blame(self.rank, reason) if reason else found
            if blame is None and self.rank == 0:
                blame = stuck({0: sign} | {rank: peer.sign for rank, peer in peers.items()}, self._limits.stall)
            if blame is not None and self.fault is None:
                self._blame(blame)
            if self._closing.wait(self._limits.beat):
                return

    # Called by the connections' threads.

    def _moved(self, connection: LinkConnection, notify: bool) -> None:
        if not connection.control:
            self._movement.note()
        if notify:
            with self._changed:
                self._changed.notify_all()

    def _lost(self, connection: LinkConnection, error: Exception) -> None:
        if connection.control:
            self._peers[connection.rank].gone = True
            if not self._peers[connection.rank].ended:
                self._blame(Blame(connection.rank, broke(error)))
        # It may break once it is not needed. If it is needed, another rank may be at fault: wait for a verdict.
        while not connection.control and not self._closing.wait(REPORT_S) and self.fault is None:
            if connection.leaving or connection.posted > connection.received:
                self._blame(Blame(connection.rank, broke(error)))
                break
        self._moved(connection, True)

    def _take(self, connection: LinkConnection, kind: Kind, payload: bytes) -> None:
        peer = self._peers[connection.rank]
        peer.heard_at = time.monotonic()
        if kind == Kind.BEAT:
            peer.sign = Sign(*json.loads(payload))
        elif kind == Kind.BLAME:
            rank, what = json.loads(payload)
            self._decide(Blame(rank, one_line(str(what))))
        elif kind == Kind.BYE:
            peer.ended = peer.gone = True
            connection.sock.shutdown(socket.SHUT_WR)  # the peer then reads the end of the stream
        else:
            peer.values[kind].append(payload)
