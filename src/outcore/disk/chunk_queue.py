"""Chunks that wait to be read, and which thread reads which: one queue for all the folders that have the same bytes.

Threads of every replica take from one queue, so their rates add up without anybody knowing them beforehand. Whoever is
slow must not hold up what is needed first: it takes a chunk only if it will have read it by the time the others would
have come to it, by the rates that were seen. So a slow disk reads what is needed later, and one that is too slow to be
of use reads nothing, but for a try now and then.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from .chunk import Chunk, Copied, Task
from .replica import Replicas

MEMORY_S = 0.5
"""Seconds of reading after which what was before counts half."""

EACH = 128 << 10
"""Bytes that could have been read in the time that a read takes whatever its size, so that who was given the small ones
does not pass for slow: 0.04 ms of a disk of 3 GB/s, where it is more, and 6 of one of 20 MB/s, where it is less."""

AGAIN_S = 0.2
"""Seconds after which whoever takes nothing of what waits looks again."""

TRY_S, TRIES = 0.25, 10
"""One that takes nothing takes something all the same after so many seconds, and so many times what its last took."""


class ChunkQueue(Protocol):
    """What a reader's threads take their work from."""

    def put(self, tasks: Sequence[Task]) -> None:
        """Add work."""

    def take(self, replica: int) -> Task | None:
        """The next piece of work for a thread of that replica; waits for one. None: the thread may end."""

    def ended(self, replica: int, chunk: Chunk, nbytes: int) -> None:
        """So much was read of what it took."""

    def failed(self, replica: int, chunk: Chunk, why: str) -> bool:
        """It could not be read there; whether others will try."""

    def close(self, threads: int) -> None:
        """Let threads end when nothing waits any more."""


class OneFolder:
    """Chunks for threads that all read from one folder."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Task | None] = queue.SimpleQueue()

    def put(self, tasks: Sequence[Task]) -> None:
        for task in tasks:
            self._queue.put(task)

    def take(self, replica: int) -> Task | None:
        return self._queue.get()

    def ended(self, replica: int, chunk: Chunk, nbytes: int) -> None:
        pass

    def failed(self, replica: int, chunk: Chunk, why: str) -> bool:
        return False

    def close(self, threads: int) -> None:
        for _ in range(threads):
            self._queue.put(None)


class _Pace:
    """How fast a replica is read from, of late. Bytes are counted with ``EACH`` for every read."""

    def __init__(self) -> None:
        self.under_way = 0
        self.last_end = 0.0
        self.last_took = 0.0
        self._reads = 0
        self._since = 0.0
        self._nbytes = 0.0
        self._seconds = 0.0

    @property
    def rate(self) -> float | None:
        """Bytes a second while something was under way; None: not known."""
        return self._nbytes / self._seconds if self._seconds > 0 and self._nbytes else None

    def begins(self, nbytes: int, now: float) -> None:
        if not self._reads:
            self._since = now
        self._reads += 1
        self.under_way += nbytes + EACH

    def ends(self, asked: int, done: int, took: float, now: float) -> None:
        self._reads -= 1
        self.under_way -= asked + EACH
        self.last_end, self.last_took = now, took
        self._nbytes += done + EACH if done else 0
        self._seconds += now - self._since
        self._since = now
        if self._seconds > MEMORY_S:
            self._nbytes, self._seconds = self._nbytes / 2, self._seconds / 2

    def forget(self) -> None:
        """Who is tried again is judged by that alone."""
        self._nbytes = self._seconds = 0.0


class ManyFolders:
    """Chunks for threads of several replicas."""

    def __init__(self, replicas: Replicas, clock: Callable[[], float] = time.perf_counter) -> None:
        self._replicas = replicas
        self._clock = clock
        self._lock = threading.Lock()
        self._changed = [threading.Condition(self._lock) for _ in replicas.all]
        self._waiting: deque[Task] = deque()
        self._paces = [_Pace() for _ in replicas.all]
        self._began: dict[int, float] = {}
        self._closed = False

    def put(self, tasks: Sequence[Task]) -> None:
        with self._lock:
            self._waiting.extend(tasks)
            for condition in self._changed:
                condition.notify(len(tasks))

    def take(self, replica: int) -> Task | None:
        with self._lock:
            while True:
                if (task := self._taken(replica)) is not None:
                    self._look_again()
                    return task
                if self._closed and not any(self._may(replica, task) for task in self._waiting):
                    return None
                # One may be lost without this queue's being told.
                self._changed[replica].wait(AGAIN_S if self._waiting else None)

    def _taken(self, replica: int) -> Task | None:
        found = self._choose(replica)
        if found is None:
            return None
        task = self._waiting[found]
        del self._waiting[found]
        if isinstance(task, Chunk):
            now = self._clock()
            self._began[id(task)] = now
            self._paces[replica].begins(task.nbytes, now)
        return task

    def ended(self, replica: int, chunk: Chunk, nbytes: int) -> None:
        with self._lock:
            now = self._clock()
            self._paces[replica].ends(chunk.nbytes, nbytes, now - self._began.pop(id(chunk)), now)
            self._look_again()
        self._replicas.read(replica, nbytes)

    def failed(self, replica: int, chunk: Chunk, why: str) -> bool:
        with self._lock:
            if self._closed:
                return False  # the others' threads may have ended
            chunk.tried.add(replica)
            alive = any(self._may(n, chunk) and self._replicas.all[n].lost is None for n in self._numbers())
            if not any(self._may(n, chunk) for n in self._numbers()):
                return False
        # Before others take it: whoever waits for the unit finds the note there.
        if alive:
            self._replicas.lose(replica, why)
        with self._lock:
            if self._closed:
                return False
            self._waiting.appendleft(chunk)
            for condition in self._changed:
                condition.notify_all()
        return True

    def close(self, threads: int) -> None:
        with self._lock:
            self._closed = True
            for condition in self._changed:
                condition.notify_all()

    def _look_again(self) -> None:
        """What one took up, or how fast it was, may make what waits another's: whoever would be done first takes it, if
        it is told. Where all wait for others, nothing moves."""
        if self._waiting:
            for condition in self._changed:
                condition.notify()

    def _numbers(self) -> range:
        return range(len(self._replicas))

    def _may(self, n: int, task: Task) -> bool:
        """Whether a replica is one to read that from: it has it, and was not lost, or nobody else is left."""
        if isinstance(task, Copied):
            return True
        if task.files[n] is None or n in task.tried:
            return False
        if self._replicas.all[n].lost is None:
            return True
        others = (m for m in self._numbers() if task.files[m] is not None and m not in task.tried)
        return all(self._replicas.all[m].lost is not None for m in others)

    def _choose(self, n: int) -> int | None:
        """Place of the task that a replica should take up; None: none yet."""
        ahead, last = 0, None
        for place, task in enumerate(self._waiting):
            if not self._may(n, task):
                continue
            if isinstance(task, Copied) or self._closed:
                return place
            cost = task.nbytes + EACH
            if self._in_time(n, [m for m in self._numbers() if m != n and self._may(m, task)], cost, ahead):
                return place
            ahead += cost
            last = place
        if last is None or not self._due(n):
            return None
        self._paces[n].forget()
        return last

    def _in_time(self, n: int, others: Sequence[int], cost: int, ahead: int) -> bool:
        """Whether it has read so much by the time the others would have, who have ``ahead`` to read before."""
        rates = [self._paces[m].rate for m in others]
        own = self._paces[n].rate
        known = [rate for rate in rates if rate is not None]
        if own is None or len(known) < len(rates) or not rates:
            return True
        under_way = [self._paces[m].under_way for m in others]
        one = min((begun + cost) / rate for begun, rate in zip(under_way, known, strict=True))
        together = (ahead + sum(under_way) + cost) / sum(known)
        return (self._paces[n].under_way + cost) / own <= max(one, together)

    def _due(self, n: int) -> bool:
        """Whether one that was too slow is to be tried again: its disk may have been asleep."""
        pace = self._paces[n]
        return not pace.under_way and self._clock() - pace.last_end > max(TRY_S, TRIES * pace.last_took)
