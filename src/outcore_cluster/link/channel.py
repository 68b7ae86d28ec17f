"""The data connection of a pair of ranks: a thread that sends and one that receives, straight from and into the
caller's memory.

Both threads sleep in the kernel or on a condition. Bytes that nobody has posted a receive for stay in the kernel's
buffers, and then in the sender's memory: TCP holds the sender up.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque
from collections.abc import Callable

from .board import LinkBoard
from .frames import HEADER_BYTES, FrameError, Kind, header, opened
from .watch import Blame, broke

PIECE = 1 << 20
"""Bytes that are handed to the kernel at once; each piece counts as work."""

SMALL = 1 << 16
"""Bytes that the caller hands to the kernel himself, where there is room for them: a thread that is to do it has to get
hold of the interpreter first, up to 5 ms (``sys.getswitchinterval``) after a caller who goes on computing."""


class Receive:
    """An ``Arrival``: a receive from one rank."""

    def __init__(self, board: LinkBoard, source: int, into: memoryview) -> None:
        self._board, self._source = board, source
        self.into = into
        self.done = False

    @property
    def ready(self) -> bool:
        """Whether ``wait`` returns or raises at once."""
        return self.done or self._board.fault is not None

    def wait(self) -> None:
        """Wait for the bytes.

        Raises:
            LinkError: the run has failed.
        """
        self._board.wait_for(lambda: self.done, self._source, due=True)


class Channel:
    """One rank's end of it.

    Args:
        peer: the rank at the other end.
        suspect: told what is wrong with the peer, or with what it sent; once.
    """

    def __init__(self, sock: socket.socket, peer: int, board: LinkBoard, suspect: Callable[[Blame], None]) -> None:
        self._sock, self._peer, self._board, self._suspect = sock, peer, board, suspect
        self._leaving: deque[tuple[bytes, memoryview]] = deque()
        self._sequence = 0
        self._posted: deque[Receive] = deque()
        self._lock = threading.Condition()
        self._over = False
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._threads = [
            threading.Thread(target=self._run, args=(work,), name=f"outcore-link-{name}-{peer}", daemon=True)
            for name, work in (("send", self._send), ("receive", self._receive))
        ]
        for thread in self._threads:
            thread.start()

    def send(self, data: memoryview) -> None:
        """Queue bytes; what is small leaves at once, where the connection takes it."""
        head = header(Kind.DATA, self._sequence, data.nbytes)
        self._sequence += 1
        with self._lock:
            if not self._leaving and data.nbytes <= SMALL:
                sent = self._sent_at_once(head, data)
                if sent == len(head) + data.nbytes:
                    return
                head, data = head[sent:], data[max(0, sent - len(head)) :]
            self._leaving.append((head, data))
            self._lock.notify_all()

    def _sent_at_once(self, head: bytes, data: memoryview) -> int:
        """Bytes that the connection takes now. What is wrong with it is found by the thread that sends the rest."""
        try:
            return self._sock.sendmsg([head, data], [], socket.MSG_DONTWAIT)
        except OSError:
            return 0

    def receive(self, into: memoryview) -> Receive:
        """Post a receive."""
        arrival = Receive(self._board, self._peer, into)
        with self._lock:
            self._posted.append(arrival)
            self._lock.notify_all()
        return arrival

    @property
    def empty(self) -> bool:
        """Whether all that was queued has been handed to the kernel."""
        return not self._leaving

    def finish(self) -> None:
        """Nothing more will be sent: the other side finds the end where its next receive would begin."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def cut(self) -> None:
        """Wake both threads, and end them."""
        with self._lock:
            self._over = True
            self._lock.notify_all()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """After ``cut``: wait for the threads, and give the connection back."""
        for thread in self._threads:
            thread.join(1.0)
        self._sock.close()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except FrameError as e:
            what = str(e)
        except (OSError, EOFError) as e:
            what = broke(e)
        else:
            return
        if not self._over:
            self._suspect(Blame(self._peer, what))

    def _send(self) -> None:
        while True:
            with self._lock:
                while not self._leaving and not self._over:
                    self._lock.wait()
                if self._over:
                    return
                head, data = self._leaving[0]
            self._send_frame(head, data)
            # What it shows may be given back now, and not when the next one comes.
            del data
            with self._lock:
                self._leaving.popleft()
            self._board.notify()

    def _send_frame(self, head: bytes, data: memoryview) -> None:
        sent = self._sock.sendmsg([head, data[:PIECE]])
        while sent < len(head):
            sent += self._sock.send(head[sent:])
        at = sent - len(head)
        while at < data.nbytes:
            at += self._sock.send(data[at : at + PIECE])
            self._board.movement.note()

    def _receive(self) -> None:
        sequence, head = 0, bytearray(HEADER_BYTES)
        while True:
            with self._lock:
                while not self._posted and not self._over:
                    self._lock.wait()
                if self._over:
                    return
                arrival = self._posted[0]
            self._fill(memoryview(head))
            kind, length = opened(bytes(head), sequence)
            if kind != Kind.DATA or length != arrival.into.nbytes:
                raise FrameError(f"it sent {length} bytes where {arrival.into.nbytes} are due")
            self._fill(arrival.into)
            sequence += 1
            with self._lock:
                self._posted.popleft()
            arrival.done = True
            del arrival
            self._board.notify()

    def _fill(self, view: memoryview) -> None:
        at = 0
        while at < view.nbytes:
            count = self._sock.recv_into(view[at:])
            if not count:
                raise EOFError
            at += count
            self._board.movement.note()
