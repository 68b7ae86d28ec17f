"""One connection between two ranks, after both have proven who they are. Format of a frame:

kind 1 byte | length 8 bytes, big-endian | payload
"""

from __future__ import annotations

import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from queue import SimpleQueue

_HEADER = struct.Struct("!BQ")
# Largest payload in bytes that the calling thread sends itself. Another thread would have to wait for the interpreter,
# up to 5 ms (``sys.getswitchinterval``) while the caller computes.
SMALL = 1 << 16
# Bytes per system call; after each call the rank counts as moving.
PIECE = 1 << 20


class Kind(IntEnum):
    """Kinds of frames: messages (``DATA``), and control frames: heartbeats, agreed and gathered values, verdicts,
    ends."""

    DATA = 1
    BEAT = 2
    AGREE = 3
    GATHER = 4
    BLAME = 5
    BYE = 6


class LinkConnection:
    """One end of a connection, which carries either messages or control frames.

    A message is received into the caller's memory. Until a receive is posted for it, it stays in the kernel's buffers,
    so TCP holds back the sender.

    Args:
        take: called with each control frame; None: the connection carries messages.
        moved: called when bytes were sent or received; the flag says whether a waiting thread may go on.
        lost: called when the connection broke.

    Attributes:
        leaving: bytes of queued frames that the kernel has not taken yet.
        posted, received: how many receives were posted, and how many messages have arrived.
    """

    def __init__(
        self,
        sock: socket.socket,
        rank: int,
        take: Callable[[LinkConnection, Kind, bytes], None] | None,
        moved: Callable[[LinkConnection, bool], None],
        lost: Callable[[LinkConnection, Exception], None],
    ) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(None)
        self.sock, self.rank, self.control = sock, rank, take is not None
        self.leaving: deque[memoryview] = deque()
        self.posted = self.received = 0
        self._take, self._moved, self._lost = take, moved, lost
        self._buffers: SimpleQueue[memoryview | None] = SimpleQueue()
        self._sending = threading.Lock()
        self.reader = threading.Thread(target=self._read, name="outcore-link-read", daemon=True)

    def post(self, into: memoryview) -> int:
        """Posts a receive for the next message. Returns the message's number, from 1."""
        self.posted += 1
        self._buffers.put(into.cast("B") if into.nbytes else memoryview(b""))
        return self.posted

    def put(self, kind: Kind, payload: memoryview) -> None:
        """Sends a frame. What the kernel does not take at once is sent by a thread."""
        header = _HEADER.pack(kind, payload.nbytes)
        small = payload.nbytes <= SMALL
        frame = [memoryview(header + payload)] if small else [memoryview(header), payload.cast("B")]
        with self._sending:
            idle = not self.leaving
            if small and idle:
                with suppress(OSError):  # the thread meets the error again
                    frame[0] = frame[0][self.sock.send(frame[0], socket.MSG_DONTWAIT) :]
            self.leaving += filter(None, frame)
            if idle and self.leaving:
                threading.Thread(target=self._write, name="outcore-link-write", daemon=True).start()

    def close(self) -> None:
        """Ends the threads and closes the socket."""
        self._buffers.put(None)
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.reader.join()
        self.sock.close()

    def _write(self) -> None:
        more = True
        try:
            while more:
                sent = self.sock.send(self.leaving[0][:PIECE])
                with self._sending:
                    self.leaving[0] = self.leaving[0][sent:]
                    if not self.leaving[0]:
                        self.leaving.popleft()
                    more = bool(self.leaving)
                self._moved(self, not more)
        except OSError as e:
            if not self.control:  # the reader still has to take frames that came before the break, such as a verdict
                self._lost(self, e)

    def _read(self) -> None:
        header = bytearray(_HEADER.size)
        try:
            while True:
                self._fill(memoryview(header))
                kind, length = _HEADER.unpack(header)
                if kind not in set(Kind) or (kind == Kind.DATA) == self.control:
                    raise ValueError("it sent bytes that are not a message of this link")
                into = memoryview(bytearray(length)) if self.control else self._buffers.get()
                if into is None:
                    return
                if length != into.nbytes:
                    raise ValueError(f"it sent {length} bytes instead of {into.nbytes}")
                self._fill(into)
                self.received += 1
                if self._take is not None:
                    self._take(self, Kind(kind), bytes(into))
                del into  # it keeps the caller's array alive
                self._moved(self, True)
        except Exception as e:  # ``take`` may raise anything for an invalid control frame
            self._lost(self, e)

    def _fill(self, into: memoryview) -> None:
        while into:
            if not (got := self.sock.recv_into(into)):
                raise EOFError
            into = into[got:]
            self._moved(self, False)
