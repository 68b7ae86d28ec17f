"""Finds the rank at fault from the heartbeats of all ranks. No sockets."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from outcore.text import one_line

NOBODY = -1
GONE = "its process has ended, or its connection broke"
LEFT = "has ended, while others wait for it"
BUSY = 0.02
"""Processor seconds per second from which a process counts as working; a waiting one takes less than 0.005."""
_IO = Path("/proc/self/io")


class Blame(NamedTuple):
    """A rank, and what is wrong with it."""

    rank: int
    what: str


def broke(error: Exception) -> str:
    """What an error of a connection says about the rank at its other end."""
    # A process that ends with bytes unread resets its connections.
    if isinstance(error, OSError) and error.errno not in (errno.ECONNRESET, errno.EPIPE, errno.ECONNABORTED):
        return f"its connection broke: {error.strerror or one_line(error)}"
    return GONE if isinstance(error, OSError | EOFError) else one_line(error)


class Sign(NamedTuple):
    """A heartbeat.

    Attributes:
        still_s: seconds since the last byte on the link if the rank waits for another, else since its last work.
        waits_for: the rank that it waits for, or ``NOBODY``.
        due: only work can bring what it waits for. Rank 0's next value may take as long as its user thinks.
    """

    still_s: float = 0.0
    waits_for: int = NOBODY
    due: bool = False


def work_of_process() -> tuple[float, int]:
    try:
        read = int(_IO.read_text().partition("\nread_bytes: ")[2].split()[0])
    except (OSError, LookupError, ValueError):
        read = 0  # macOS has no such file
    return time.process_time() - time.thread_time(), read


class Movement:
    """What this process does, and which rank it waits for. ``work`` returns the processor seconds of all other threads
    so far, and the bytes read from disks; one evaluation on a device counts for up to ``computing_s`` seconds."""

    def __init__(
        self,
        computing_s: float,
        work: Callable[[], tuple[float, int]] = work_of_process,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._computing_s, self._work, self._clock = computing_s, work, clock
        self._count = self._seen = 0
        self._moved_at = self._noted_at = self._looked_at = clock()
        self._done: tuple[float, int] = (0.0, 0)
        self._waits: tuple[float, int, bool] | None = None
        self._works: float | None = None

    def note(self) -> None:
        self._count += 1

    def look(self) -> Sign:
        """Returns the next heartbeat. One thread calls it, about once per beat."""
        now, done = self._clock(), self._work()
        if self._count != self._seen:
            self._noted_at = self._moved_at = now
        busy = done[0] - self._done[0] >= BUSY * (now - self._looked_at) or done[1] != self._done[1]
        works = self._works
        if busy or (works is not None and now - works < self._computing_s):
            self._moved_at = now
        self._seen, self._done, self._looked_at = self._count, done, now
        since, rank, due = self._waits or (now, NOBODY, False)
        return Sign(now - (self._moved_at if rank == NOBODY else max(since, self._noted_at)), rank, due)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Marks an evaluation on a device, which takes no processor time of this process."""
        self._works = self._clock()
        try:
            yield
        finally:
            self._works = None
            self._count += 1

    @contextmanager
    def waiting(self, rank: int, due: bool) -> Iterator[None]:
        """Marks a wait for a rank."""
        self._waits = self._clock(), rank, due
        try:
            yield
        finally:
            self._waits = None
            self._count += 1


def silent(me: int, names: Sequence[str], heard: Mapping[int, float], now: float, silence_s: float) -> Blame | None:
    """Blames the rank that has been silent for longest, if for too long. Blames this rank if it hears none of several
    hosts (``names``, by rank): its own network has failed more probably than all of theirs."""
    rank = min(heard, key=lambda peer: heard[peer], default=me)
    if now - heard.get(rank, now) <= silence_s:
        return None
    if len({names[peer] for peer in heard}) > 1 and now - max(heard.values()) > silence_s / 2:
        return Blame(me, f"has heard nothing of the others for {silence_s:.3g} s")
    return Blame(rank, f"silent for {silence_s:.3g} s")


def stuck(signs: Mapping[int, Sign], stall_s: float) -> Blame | None:
    """Blames a rank once none has moved for ``stall_s``: an idle one whose work is due, or one of a circle."""
    if min(sign.still_s for sign in signs.values()) < stall_s:
        return None
    idle = [rank for rank, sign in signs.items() if sign.waits_for == NOBODY]
    for rank, sign in signs.items():
        if sign.due and sign.waits_for in idle:
            still_s = signs[sign.waits_for].still_s
            return Blame(sign.waits_for, f"has done nothing for {still_s:.0f} s, while rank {rank} waits for it")
    if idle:
        return None  # rank 0 may be waiting for a user
    chain, at = list[int](), min(signs)
    while at in signs and at not in chain:
        chain.append(at)
        at = signs[at].waits_for
    circle = " and ".join(map(str, sorted(chain[chain.index(at) :] if at in chain else chain)))
    return Blame(chain[-1], f"ranks {circle} wait for one another")
