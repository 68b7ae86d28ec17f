"""One connection between two ranks that have proven who they are: frames in both directions, as its socket has room.

    kind 1 | length 8 | payload

Big-endian. Payloads of data go straight from and into the caller's memory; what nobody has asked for yet stays in the
kernel's buffers, so TCP holds the sender up.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from collections.abc import Callable, Iterator
from enum import IntEnum

from .verdict import Sign

_HEADER = struct.Struct("!BQ")
SMALL = 1 << 16
"""Bytes of a frame that leaves in one piece, and at once where there is room for it: a thread that is to do it has to
get hold of the interpreter first, up to 5 ms (``sys.getswitchinterval``) after a caller who goes on computing."""
PIECE = 1 << 20
"""Bytes that are handed to the kernel at once."""
MOST_CONTROL = 1 << 28
"""Payload bytes of a frame that is no data: what ranks agree on is a request at most."""


class Kind(IntEnum):
    """What a frame is: data, a sign of life, values, whose fault it is (at rank 0: seems to be), and that one is
    done."""

    DATA = 1
    BEAT = 2
    AGREE = 3
    GATHER = 4
    BLAME = 5
    BYE = 6


class LinkConnection:
    """One end of a connection, for data or for all else.

    Args:
        heard_at: by when it must be heard of, less the silence that is allowed.
        take: told of this connection and each frame that is no data.

    Attributes:
        heard_at: when it last was. ``sign``: the last that was heard.
        ended: the other rank has said that its part is done. ``gone``: nothing more comes from it.
        watched: its thread is told when more has come.
        leaving: bytes that the kernel has not taken yet. ``posted``: where data goes, in order.
        asked, received: messages of data that somebody asked for so far, and that are there.
    """

    def __init__(
        self,
        sock: socket.socket,
        rank: int,
        data: bool,
        heard_at: float,
        take: Callable[[LinkConnection, Kind, bytes], None],
    ) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock, self.rank, self.data, self.heard_at = sock, rank, data, heard_at
        self.sign, self.ended, self.gone, self.watched = Sign(), False, False, False
        self.leaving: deque[memoryview] = deque()
        self.posted: deque[memoryview] = deque()
        self.asked = self.received = 0
        self._places = self._frames(take)
        self._into = next(self._places)

    def put(self, kind: Kind, payload: memoryview) -> None:
        """Queue a frame."""
        header = _HEADER.pack(kind, payload.nbytes)
        if payload.nbytes <= SMALL:
            self.leaving.append(memoryview(header + payload))
        else:
            self.leaving += memoryview(header), payload

    def write(self) -> None:
        """Hand the kernel what it takes now of a piece.

        Raises:
            BlockingIOError: nothing. OSError: the connection broke.
        """
        sent = self.sock.send(self.leaving[0][:PIECE])
        self.leaving[0] = self.leaving[0][sent:]
        if not self.leaving[0].nbytes:
            self.leaving.popleft()

    def read(self) -> None:
        """Take what is there, until nobody waits for more, or the other rank has ended.

        Raises:
            BlockingIOError: more has to come. OSError: the connection broke. EOFError: the other side hung up.
            ValueError, TypeError: it sent what it should not.
        """
        while self.posted if self.data else not self.ended:
            got = self.sock.recv_into(self._into)
            if not got:
                raise EOFError
            self._into = self._into[got:]
            while not self._into.nbytes:
                self._into = next(self._places)

    def _frames(self, take: Callable[[LinkConnection, Kind, bytes], None]) -> Iterator[memoryview]:
        """Where the bytes go that come next."""
        header = bytearray(_HEADER.size)
        while True:
            yield memoryview(header)
            kind, length = _HEADER.unpack(header)
            if kind not in set(Kind) or (kind == Kind.DATA) != self.data:
                raise ValueError("bytes that are no frame")
            if self.data:
                if length != self.posted[0].nbytes:
                    raise ValueError(f"it sent {length} bytes where {self.posted[0].nbytes} are due")
                yield self.posted[0]
                self.posted.popleft()
                self.received += 1
            elif length > MOST_CONTROL:
                raise ValueError(f"a frame of {length} bytes")
            else:
                payload = bytearray(length)
                yield memoryview(payload)
                take(self, Kind(kind), bytes(payload))
