"""Ranks as threads of one process: what tests have in place of sockets."""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass, field

from ..errors import LinkError
from .link import Link

PATIENCE_S = 60.0
"""Seconds that a rank waits for another one's bytes."""


@dataclass
class _Shared:
    """What all ranks of one process have in common: messages from one to another, and values to agree on."""

    size: int
    queues: dict[tuple[int, int, str], queue.SimpleQueue[bytes | None]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    closed: threading.Event = field(default_factory=threading.Event)

    def queue(self, source: int, to: int, what: str) -> queue.SimpleQueue[bytes | None]:
        with self.lock:
            return self.queues.setdefault((source, to, what), queue.SimpleQueue())

    def take(self, source: int, to: int, what: str, patience_s: float) -> bytes:
        try:
            found = None if self.closed.is_set() else self.queue(source, to, what).get(timeout=patience_s)
        except queue.Empty:
            raise LinkError(f"rank {source} (this process): silent for {patience_s:g} s") from None
        if found is None:
            raise LinkError(f"rank {source} (this process): gone")
        return found

    def end(self) -> None:
        self.closed.set()
        with self.lock:
            for each in self.queues.values():
                each.put(None)


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
        self._into[:] = data

    @property
    def done(self) -> bool:
        return self._done


class MemoryLink:
    """One rank's side, as in ``Link``."""

    def __init__(self, shared: _Shared, rank: int, patience_s: float) -> None:
        self.rank, self.size = rank, shared.size
        self._shared, self._patience_s = shared, patience_s
        self._posted: dict[int, list[_MemoryArrival]] = {}

    def send(self, to: int, data: memoryview) -> None:
        self._shared.queue(self.rank, to, "data").put(bytes(data))

    def receive(self, source: int, into: memoryview) -> _MemoryArrival:
        arrival = _MemoryArrival(self, source, into)
        self._posted.setdefault(source, []).append(arrival)
        return arrival

    def waiting(self, source: int) -> int:
        """Messages of a rank that were sent and not taken."""
        return self._shared.queue(source, self.rank, "data").qsize()

    def fill_until(self, source: int, last: _MemoryArrival) -> None:
        """Take messages of a rank, in order, up to one's."""
        posted = self._posted.get(source, [])
        while not last.done:
            posted.pop(0).fill(self._shared.take(source, self.rank, "data", self._patience_s))

    def agree(self, value: bytes) -> bytes:
        return self._exchange(value, "agree", [0])[0]

    def gather(self, value: bytes) -> list[bytes]:
        return self._exchange(value, "gather", range(self.size))

    def _exchange(self, value: bytes, what: str, sources: range | list[int]) -> list[bytes]:
        if self.rank in sources:
            for to in range(self.size):
                self._shared.queue(self.rank, to, what).put(value)
        return [self._shared.take(source, self.rank, what, self._patience_s) for source in sources]

    def progress(self) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None:
        self._shared.end()


def memory_links(size: int, patience_s: float = PATIENCE_S) -> list[Link]:
    """The links of so many ranks, each for a thread of this process. When one is closed, all are.

    Args:
        patience_s: seconds after which a rank that says nothing is given up.
    """
    shared = _Shared(size)
    return [MemoryLink(shared, rank, patience_s) for rank in range(size)]
