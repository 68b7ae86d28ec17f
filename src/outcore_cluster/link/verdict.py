"""Finds the rank at fault from the heartbeats of all ranks. No sockets."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from outcore.text import one_line

NOBODY, DEVICE = -1, -2
GONE = "its process has ended, or its connection broke"
# A process that takes at least so many processor seconds per second is working; a waiting one takes less than 0.005.
BUSY = 0.02


class Blame(NamedTuple):
    """The rank at fault, and what is wrong with it."""

    rank: int
    what: str


def broke(error: Exception) -> str:
    """Returns what an error of a connection says about the rank at the other end."""
    if isinstance(error, ConnectionError | EOFError):  # a process that ends with bytes unread resets its connections
        return GONE
    return f"its connection broke: {error.strerror or error}" if isinstance(error, OSError) else one_line(error)


class Sign(NamedTuple):
    """A heartbeat.

    Attributes:
        still_s: seconds since the last byte on the link if the rank waits for another, else since its last work.
        waits_for: the rank that it waits for, or ``NOBODY``.
        due: whether only work of that rank can end the wait. (Rank 0's next value may take as long as its user thinks.)
    """

    still_s: float = 0.0
    waits_for: int = NOBODY
    due: bool = False


def work_of_process() -> tuple[float, int]:
    try:
        read = int(Path("/proc/self/io").read_text().partition("\nread_bytes: ")[2].split()[0])
    except (OSError, LookupError, ValueError):
        read = 0  # macOS has no such file
    return time.process_time() - time.thread_time(), read


class Movement:
    """Notes when this process last worked, and which rank it waits for. ``work`` returns processor seconds of all other
    threads and bytes read from disks; an evaluation on a device is work for up to ``computing_s`` seconds."""

    def __init__(
        self,
        computing_s: float,
        work: Callable[[], tuple[float, int]] = work_of_process,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._computing_s, self._work, self._clock = computing_s, work, clock
        self._moved_at = self._noted_at = self._looked_at = clock()
        self._done: tuple[float, int] = (0.0, 0)
        self._doing: tuple[float, int, bool] | None = None

    def note(self) -> None:
        self._noted_at = self._clock()

    def look(self) -> Sign:
        """Returns the next heartbeat. One thread calls it, about once per beat."""
        now, done = self._clock(), self._work()
        busy = done[0] - self._done[0] >= BUSY * (now - self._looked_at) or done[1] != self._done[1]
        since, rank, due = self._doing or (now, NOBODY, False)
        if busy or (rank == DEVICE and now - since < self._computing_s):
            self._moved_at = now
        self._done, self._looked_at = done, now
        if rank < 0:
            return Sign(now - max(self._moved_at, self._noted_at))
        return Sign(now - max(since, self._noted_at), rank, due)

    @contextmanager
    def waiting(self, rank: int, due: bool) -> Iterator[None]:
        """Marks a wait for a rank, or for ``DEVICE``: an evaluation, which takes no processor time."""
        self._doing = self._clock(), rank, due
        try:
            yield
        finally:
            self._doing = None
            self.note()


def silent(heard: Mapping[int, float], now: float, silence_s: float) -> Blame | None:
    """Blames the rank whose last heartbeat (``heard``, by rank) is oldest if it is older than ``silence_s``."""
    rank = min(heard, key=lambda peer: heard[peer], default=NOBODY)
    return Blame(rank, f"silent for {silence_s:.3g} s") if now - heard.get(rank, now) > silence_s else None


def stuck(signs: Mapping[int, Sign], stall_s: float) -> Blame | None:
    """Blames a rank once none has moved for ``stall_s``: an idle one that another waits for, or any if all wait."""
    if min(sign.still_s for sign in signs.values()) < stall_s:
        return None
    idle = {rank: sign for rank, sign in signs.items() if sign.waits_for == NOBODY}
    for rank, sign in signs.items():
        if sign.due and sign.waits_for in idle:
            still_s = idle[sign.waits_for].still_s
            return Blame(sign.waits_for, f"has done nothing for {still_s:.0f} s, while rank {rank} waits for it")
    # An idle rank 0 may be waiting for its user.
    last, sign = max(signs.items())
    return None if idle else Blame(last, f"waits for rank {sign.waits_for}, while all ranks wait for one another")
