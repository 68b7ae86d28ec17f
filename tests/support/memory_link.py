"""Ranks as threads of one process: what tests have in place of sockets."""

from __future__ import annotations

import contextlib
import queue
import threading
from contextlib import AbstractContextManager

from outcore.errors import LinkError
from outcore_cluster.link_protocol import Link

PATIENCE_S = 60.0
"""Seconds that a rank waits for another one's bytes."""


class Letters:
    """What ranks of one process have in common: messages from one to another, and values to agree on.

    Attributes:
        ended: nothing more will come of anybody.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._queues: dict[tuple[int, int, str], queue.SimpleQueue[bytes | None]] = {}
        self._lock = threading.Lock()
        self.ended = False

    def put(self, source: int, to: int, what: str, data: bytes) -> None:
        """A rank sends another one something."""
        self._queue(source, to, what).put(data)

    def waiting(self, source: int, to: int, what: str) -> int:
        """How much of it was not taken."""
        return self._queue(source, to, what).qsize()

    def take(self, source: int, to: int, what: str, patience_s: float) -> bytes:
        """The next of it.

        Raises:
            LinkError: nothing came, or nothing will.
        """
        try:
            found = self._queue(source, to, what).get(timeout=patience_s)
        except queue.Empty:
            raise LinkError(f"rank {source} (this machine): silent for {patience_s:g} s") from None
        if found is None:
            self.put_end(source, to, what)
            raise LinkError(f"rank {source} (this machine): gone")
        return found

    def put_end(self, source: int, to: int, what: str) -> None:
        """Nothing more will come."""
        self._queue(source, to, what).put(None)

    def end(self) -> None:
        """Nothing more will come of anybody."""
        with self._lock:
            self.ended = True
            for each in self._queues.values():
                each.put(None)

    def _queue(self, source: int, to: int, what: str) -> queue.SimpleQueue[bytes | None]:
        with self._lock:
            key = (source, to, what)
            if key not in self._queues:
                self._queues[key] = queue.SimpleQueue()
                if self.ended:
                    self._queues[key].put(None)
            return self._queues[key]


class _MemoryArrival:
    def __init__(self, link: MemoryLink, source: int, into: memoryview) -> None:
        self._link, self._source, self._into = link, source, into
        self._done = False

    @property
    def ready(self) -> bool:
        return self._done or bool(self._link.waiting(self._source))

    def wait(self) -> None:
        self._link.fill_until(self._source, self)

    def fill(self, data: bytes) -> None:
        self._done = True
        if len(data) != self._into.nbytes:
            raise LinkError(f"rank {self._source} sent {len(data)} bytes where {self._into.nbytes} were expected")
        self._into.cast("B")[:] = data

    @property
    def done(self) -> bool:
        return self._done


class MemoryLink:
    """One rank's side, as in ``Link``."""

    def __init__(self, letters: Letters, rank: int, patience_s: float) -> None:
        self.rank, self.size = rank, letters.size
        self._letters, self._patience_s = letters, patience_s
        self._posted: dict[int, list[_MemoryArrival]] = {}

    def send(self, to: int, data: memoryview) -> None:
        self._letters.put(self.rank, to, "data", bytes(data))

    def receive(self, source: int, into: memoryview) -> _MemoryArrival:
        arrival = _MemoryArrival(self, source, into)
        self._posted.setdefault(source, []).append(arrival)
        return arrival

    def waiting(self, source: int) -> int:
        """Messages of a rank that were sent and not taken."""
        return self._letters.waiting(source, self.rank, "data")

    def fill_until(self, source: int, last: _MemoryArrival) -> None:
        """Take messages of a rank, in order, up to one's."""
        posted = self._posted.get(source, [])
        while not last.done:
            posted.pop(0).fill(self._letters.take(source, self.rank, "data", self._patience_s))

    def agree(self, value: bytes) -> bytes:
        return self._exchange(value, "agree", [0])[0]

    def gather(self, value: bytes) -> list[bytes]:
        return self._exchange(value, "gather", range(self.size))

    def _exchange(self, value: bytes, what: str, sources: range | list[int]) -> list[bytes]:
        if self.rank in sources:
            for to in range(self.size):
                self._letters.put(self.rank, to, what, value)
        return [self._letters.take(source, self.rank, what, self._patience_s) for source in sources]

    def working(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def check(self) -> None:
        if self._letters.ended:
            raise LinkError("another rank (this machine): gone")

    def fail(self, reason: str) -> None:
        self._letters.end()

    def flush(self) -> None: ...

    def close(self) -> None:
        self._letters.end()


def memory_links(size: int, patience_s: float = PATIENCE_S) -> list[Link]:
    """The links of so many ranks, each for a thread of this process. When one is closed, all are.

    Args:
        patience_s: seconds after which a rank that says nothing is given up.
    """
    letters = Letters(size)
    return [MemoryLink(letters, rank, patience_s) for rank in range(size)]
