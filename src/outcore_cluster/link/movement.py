"""Whether this rank does anything, and whom it waits for: what its heartbeat tells the others."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .limits import LinkLimits

BUSY = 0.02
"""Processor seconds a second from which on a process counts as working. One that waits in the kernel takes less than
0.005."""

_SIGN = struct.Struct("!dq?")
NOBODY = -1


@dataclass(frozen=True)
class Sign:
    """What a heartbeat says of a rank.

    Attributes:
        still_s: seconds without any sign of work.
        waits_for: the rank that it waits for, or ``NOBODY``.
        due: whether that is for bytes that only work can bring; waiting for rank 0's next value may take as long as
            a user thinks.
    """

    still_s: float = 0.0
    waits_for: int = NOBODY
    due: bool = False

    def packed(self) -> bytes:
        """As the payload of a frame."""
        return _SIGN.pack(self.still_s, self.waits_for, self.due)

    @classmethod
    def unpacked(cls, data: bytes) -> Sign:
        """Back from it.

        Raises:
            struct.error: it is none.
        """
        return cls(*_SIGN.unpack(data))


@dataclass(frozen=True)
class Wait:
    """Somebody in this process waits for a rank since a moment."""

    rank: int
    due: bool
    since: float


class Movement:
    """What this process has done lately.

    Args:
        worked: processor seconds of it so far, without those of the thread that asks.
        read: bytes that it has had from disks so far.
        computing_s: that something which ``working`` was told of counts as work.
    """

    def __init__(
        self,
        worked: Callable[[], float] | None = None,
        read: Callable[[], int] | None = None,
        clock: Callable[[], float] = time.monotonic,
        computing_s: float = LinkLimits.computing,
    ) -> None:
        self._computing_s = computing_s
        self._worked, self._read, self._clock = worked or others_seconds, read or bytes_read, clock
        self._count = self._seen = 0
        self._moved_at = self._looked_at = self._noted_at = clock()
        self._work, self._bytes = 0.0, 0
        self._waits: dict[int, Wait] = {}
        self._works: dict[int, float] = {}

    def note(self) -> None:
        """Something was done."""
        self._count += 1

    def look(self) -> None:
        """Compare with the last look; called by one thread, about once a heartbeat."""
        now, work, nbytes = self._clock(), self._worked(), self._read()
        busy = work - self._work >= BUSY * (now - self._looked_at)
        computing = any(now - since < self._computing_s for since in list(self._works.values()))
        if self._count != self._seen:
            self._noted_at = now
        if self._count != self._seen or busy or computing or nbytes != self._bytes:
            self._moved_at = now
        self._seen, self._work, self._bytes, self._looked_at = self._count, work, nbytes, now

    @contextmanager
    def working(self) -> Iterator[None]:
        """This thread has a device compute meanwhile, which takes none of this process's time."""
        thread = threading.get_ident()
        self._works[thread] = self._clock()
        try:
            yield
        finally:
            self._works.pop(thread, None)
            self._count += 1

    @contextmanager
    def waiting(self, rank: int, due: bool) -> Iterator[None]:
        """This thread waits for a rank meanwhile."""
        thread = threading.get_ident()
        self._waits[thread] = Wait(rank, due, self._clock())
        try:
            yield
        finally:
            self._waits.pop(thread, None)

    @property
    def wait(self) -> Wait | None:
        """What was waited for first, of what is waited for."""
        return min(list(self._waits.values()), key=lambda wait: wait.since, default=None)

    @property
    def quiet_s(self) -> float:
        """Seconds for which nothing was noted, whatever else this process does."""
        return self._clock() - self._noted_at if self._count == self._seen else 0.0

    def sign(self) -> Sign:
        """What to tell the others."""
        still, wait = self._clock() - self._moved_at, self.wait
        return Sign(still, wait.rank, wait.due) if wait is not None else Sign(still)


def others_seconds() -> float:
    """Processor seconds of this process so far, without the calling thread's."""
    return time.process_time() - time.thread_time()


_IO = Path("/proc/self/io")


def bytes_read() -> int:
    """Bytes that this process has had from disks so far; 0 where the system does not say (macOS)."""
    try:
        return int(next(line for line in _IO.read_text().splitlines() if line.startswith("read_bytes:")).split()[1])
    except (OSError, StopIteration, ValueError):
        return 0
