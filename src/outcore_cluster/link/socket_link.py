"""A link over TCP.

Every pair of ranks has two connections: bytes go over one, signs of life over the other, so that a message of gigabytes
delays no heartbeat. Both are authenticated when they are made (``handshake``); nothing is encrypted after that. Over a
network that others use, put the link into WireGuard or an ssh tunnel.

A run that has failed ends on all ranks: whoever waits for anything gets a ``LinkError``, and a process that has not
ended by itself after ``LinkLimits.grace`` is ended, with status 1.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from outcore.errors import LinkError

from .board import LinkBoard, end_within
from .channel import Channel, Receive
from .control import ControlLink, packed
from .frames import Frame, FrameError, Kind, header
from .limits import LinkLimits
from .meeting import CONTROL, DATA, Identity, Meeting
from .movement import Movement
from .watch import Blame

_COUNT = struct.Struct("!Q")


class SocketLink:
    """One rank's side. Making it waits until all ranks are there.

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
        self.rank, self.size = me.rank, me.size
        self._me, self._limits, self._leave = me, limits or LinkLimits(), leave
        self._board = LinkBoard(Movement(computing_s=self._limits.computing))
        self._agreed: deque[bytes] = deque()
        self._agreements = 0  # values that were agreed on: of rank 0 that it told, of others that they took
        self._gathered: deque[list[bytes]] = deque()
        self._offered: dict[int, deque[bytes]] = {rank: deque() for rank in range(me.size)}
        self._closed = False
        began = time.monotonic()
        connections = self._met(Meeting(me, self._limits, listener, alone))
        self._control = ControlLink(
            me,
            {rank: sock for (rank, purpose), sock in connections.items() if purpose == CONTROL},
            self._board,
            self._limits,
            self._heard,
            self._failed,
            alone,
        )
        self._channels = {
            rank: Channel(sock, rank, self._board, self._control.suspect)
            for (rank, purpose), sock in connections.items()
            if purpose == DATA
        }
        self._control.start()
        self._await_all(self._limits.start - (time.monotonic() - began))

    @property
    def identity(self) -> Identity:
        """Who this is, and where the others are."""
        return self._me

    @property
    def host(self) -> str:
        """What users call this rank's."""
        return self._me.names[self.rank]

    def send(self, to: int, data: memoryview) -> None:
        """Queue bytes for a rank. They stay as they are until ``flush``.

        Raises:
            LinkError: the run has failed.
        """
        self._board.check()
        self._board.movement.note()
        self._channels[to].send(data.cast("B") if data.nbytes else memoryview(b""))

    def receive(self, source: int, into: memoryview) -> Receive:
        """Post a receive.

        Raises:
            LinkError: the run has failed.
        """
        self._board.check()
        self._board.movement.note()
        return self._channels[source].receive(into.cast("B") if into.nbytes else memoryview(b""))

    def agree(self, value: bytes) -> bytes:
        """Rank 0's value. Rank 0 waits for nobody.

        Raises:
            LinkError: the run has failed.
        """
        self._board.check()
        self._board.movement.note()
        if self.rank == 0:
            self._agreements += 1
            self._control.tell_all(Kind.AGREE, value)
            return value
        self._board.wait_for(lambda: bool(self._agreed), 0, due=False)
        self._agreements += 1
        return self._agreed.popleft()

    def gather(self, value: bytes) -> list[bytes]:
        """Everybody's value, by rank.

        Raises:
            LinkError: the run has failed, or a rank is at another place of it.
        """
        self._board.check()
        self._board.movement.note()
        if self.rank:
            self._control.tell(0, Kind.GATHER, _COUNT.pack(self._agreements) + value)
            self._board.wait_for(lambda: bool(self._gathered), 0, due=False)
            return self._gathered.popleft()
        values = [value]
        for rank in range(1, self.size):
            offered = self._offered[rank]
            self._board.wait_for(lambda offered=offered: bool(offered), rank, due=False)  # type: ignore[misc]
            values.append(self._in_step(rank, offered.popleft()))
        self._control.tell_all(Kind.GATHERED, joined(values))
        return values

    def _in_step(self, rank: int, told: bytes) -> bytes:
        """A rank's value. One that has left some of what was agreed on would take it for what comes next."""
        (agreements,) = _COUNT.unpack_from(told)
        if agreements != self._agreements:
            why = f"is out of step: it has taken {agreements} values of {self._agreements} that were agreed on"
            self._control.fail(Blame(rank, f"{why}; each rank has to do the same, to the same end"))
            self._board.check()
        return told[_COUNT.size :]

    def working(self) -> AbstractContextManager[None]:
        """As in ``Link``."""
        return self._board.movement.working()

    def check(self) -> None:
        """Look whether the run goes on.

        Raises:
            LinkError: it has failed.
        """
        self._board.check()

    def flush(self) -> None:
        """Wait until what was queued is the kernel's.

        Raises:
            LinkError: the run has failed.
        """
        for rank, channel in self._channels.items():
            self._board.wait_for(lambda channel=channel: channel.empty, rank, due=True)  # type: ignore[misc]

    def fail(self, reason: str) -> None:
        """End the run on all ranks: this one cannot go on. Nothing of one whose part is over."""
        if not self._closed:
            self._control.fail(Blame(self.rank, reason))

    def close(self) -> None:
        """Send what was queued, and end this rank's part. Ranks that still wait for it fail then."""
        if self._closed:
            return
        self._closed = True
        try:
            with contextlib.suppress(LinkError):
                self.flush()
        finally:
            self._board.closing = True
            for channel in self._channels.values():
                channel.finish()
            self._control.close()
            for channel in self._channels.values():
                channel.cut()
            for channel in self._channels.values():
                channel.close()

    def _met(self, meeting: Meeting) -> dict[tuple[int, str], socket.socket]:
        try:
            return meeting.meet()
        except BaseException as e:
            there = meeting.there
            if isinstance(e, LinkError) and self.rank and (0, CONTROL) in there and e.rank is not None:
                # So that rank 0, which has met everybody, names the right one.
                with contextlib.suppress(OSError):
                    blame = packed(Blame(e.rank, str(e).partition(") ")[2] or str(e)))
                    there[0, CONTROL].sendall(header(Kind.FAULT, 0, len(blame)) + blame)
            for sock in there.values():
                sock.close()
            raise

    def _await_all(self, left_s: float) -> None:
        """Wait until everybody has met everybody. Rank 0 says who did not, if nobody knows better."""
        # A rank that lacks another one tells rank 0 by then.
        self._control.expect_all(time.monotonic() + left_s + (2 if self.rank else 1) * self._limits.verdict)
        try:
            self.gather(b"")
        except BaseException:
            self.close()
            raise
        self._control.expect_all(None)

    def _heard(self, rank: int, frame: Frame) -> None:
        if frame.kind == Kind.AGREE and rank == 0:
            self._agreed.append(frame.payload)
        elif frame.kind == Kind.GATHERED and rank == 0:
            self._gathered.append(parted(frame.payload, self.size))
        elif frame.kind == Kind.GATHER and self.rank == 0 and len(frame.payload) >= _COUNT.size:
            self._offered[rank].append(frame.payload)
        else:
            raise FrameError(f"{frame.kind.name} from rank {rank} at rank {self.rank}")
        self._board.notify()

    def _failed(self, error: LinkError) -> None:
        for channel in self._channels.values():
            channel.cut()
        if self._leave is not None:
            end_within(self._limits.grace, error, lambda: self._board.raised, self._leave)


def joined(values: Sequence[bytes]) -> bytes:
    """Values as one payload."""
    return b"".join(_COUNT.pack(len(value)) + value for value in values)


def parted(payload: bytes, size: int) -> list[bytes]:
    """Back from it.

    Raises:
        FrameError: there are not as many.
    """
    values, at = [], 0
    while at < len(payload):
        (length,) = _COUNT.unpack_from(payload, at)
        at += _COUNT.size
        values.append(payload[at : at + length])
        at += length
    if len(values) != size or at != len(payload):
        raise FrameError(f"{len(values)} values of {size} ranks")
    return values
