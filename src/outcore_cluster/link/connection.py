"""One connection between two ranks that have proven who they are: frames in both directions, as its socket has room.

    magic 4 | kind 1 | reserved 3 | sequence 8 | length 8 | payload

Big-endian. The sequence counts the frames of one direction from 0 on. Payloads of data go straight from and into the
caller's memory; what nobody has asked for yet stays in the kernel's buffers, so TCP holds the sender up.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from contextlib import suppress
from enum import IntEnum
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .socket_link import Receive

MAGIC = b"OCLF"
_HEADER = struct.Struct("!4sB3xQQ")
MOST_CONTROL = 1 << 28
"""Payload bytes of a frame that is no data: what ranks agree on is a request at most."""
PIECE = 1 << 20
"""Bytes that are handed to the kernel at once."""


class Kind(IntEnum):
    """What a frame is: data, a sign of life, values, whose fault it seems to be, whose it is, and that one is done."""

    DATA = 1
    BEAT = 2
    AGREE = 3
    GATHER = 4
    GATHERED = 5
    FAULT = 6
    VERDICT = 7
    BYE = 8


class LinkConnection:
    """One end of it; its socket does not block.

    Attributes:
        data: whether it carries data, or all other frames. ``events``: that its socket is watched for.
        lost: nothing comes or goes any more.
        leaving: bytes that the kernel has not taken yet. ``posted``: receives that data goes into, in order.
    """

    def __init__(self, sock: socket.socket, rank: int, data: bool) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock, self.rank, self.data, self.events, self.lost = sock, rank, data, 0, False
        self.leaving: deque[memoryview] = deque()
        self.posted: deque[Receive] = deque()
        self._sent = self._received = 0
        self._kind: Kind | None = None
        self._read = bytearray(_HEADER.size)
        self._left = memoryview(self._read)

    @property
    def wanted(self) -> bool:
        """Whether anybody waits for what comes."""
        return not self.data or bool(self.posted)

    def put(self, kind: Kind, payload: memoryview) -> None:
        """Queue a frame."""
        self.leaving.append(memoryview(_HEADER.pack(MAGIC, kind, self._sent, payload.nbytes)))
        self._sent += 1
        if payload.nbytes:
            self.leaving.append(payload)

    def write(self) -> int:
        """Hand the kernel what it takes now; bytes.

        Raises:
            OSError: the connection broke.
        """
        sent = left = 0
        if self.leaving:
            # What is longer than a piece is the last that is handed over.
            whole = self.leaving[0].nbytes <= PIECE
            with suppress(BlockingIOError):
                sent = left = self.sock.sendmsg([each[:PIECE] for each in islice(self.leaving, 1 + whole)])
        while self.leaving and left >= self.leaving[0].nbytes:
            left -= self.leaving.popleft().nbytes
        if left:
            self.leaving[0] = self.leaving[0][left:]
        return sent

    def read(self) -> tuple[Kind, bytes] | None:
        """The frame that has come whole by now, of data without its payload; None: more of it has to come.

        Raises:
            ValueError: it is none. EOFError: nothing more comes.
            BlockingIOError: nothing is there. OSError: the connection broke.
        """
        if not self._whole():
            return None
        if self._kind is None:
            self._kind, self._left = self._opened()
            if not self._whole():
                return None
        kind, payload = self._kind, b"" if self.data else bytes(self._read)
        if self.data:
            self.posted.popleft().done = True
        self._kind, self._read = None, bytearray(_HEADER.size)
        self._left = memoryview(self._read)
        self._received += 1
        return kind, payload

    def _whole(self) -> bool:
        """Read what is there of what is being read, and say whether that was all."""
        if self._left.nbytes:
            if not (count := self.sock.recv_into(self._left)):
                raise EOFError
            self._left = self._left[count:]
        return not self._left.nbytes

    def _opened(self) -> tuple[Kind, memoryview]:
        """By a header, the kind of frame and where its payload goes."""
        magic, kind, sequence, length = _HEADER.unpack(self._read)
        if magic != MAGIC or kind not in Kind.__members__.values():
            raise ValueError("bytes that are no frame")
        if sequence != self._received or (kind == Kind.DATA) != self.data:
            raise ValueError(f"frame {sequence}, kind {kind}, where {self._received} was next")
        if self.data:
            if length != self.posted[0].into.nbytes:
                raise ValueError(f"it sent {length} bytes where {self.posted[0].into.nbytes} are due")
            return Kind.DATA, self.posted[0].into
        if length > MOST_CONTROL:
            raise ValueError(f"a frame of {length} bytes")
        self._read = bytearray(length)
        return Kind(kind), memoryview(self._read)
