"""What the engine counts while it runs. Written to by the engine, never asked by it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields


@dataclass
class ExpertCounters:
    """Routed experts.

    Attributes:
        used: that calls were computed with out of pools; ``read``: of these, those that were not there and were read.
        foreseen: read before they were asked for, and not in ``read``; ``wasted``: of these, those that were not asked
            for then.
    """

    used: int = 0
    read: int = 0
    foreseen: int = 0
    wasted: int = 0


class _UnderWay:
    """How many reads are under way, and since when there is one."""

    def __init__(self) -> None:
        self.lock, self.count, self.since = threading.Lock(), 0, 0.0


@dataclass
class Metrics:
    """Counters of one streamed model since it was loaded, or since ``reset``.

    Attributes:
        sweeps: forward passes that went over the streamed units. ``units``: streamed units computed; ``misses``: of
            these, those that read-ahead had not foreseen and that were read on demand.
        bytes_read: bytes read from files into slots, block rounding included; ``read_s``: seconds during which at least
            one read was under way.
        stall_s, ranks_s: seconds that the loop waited for a read, for other ranks.
        rows_read: rows of embeddings read one by one; not in ``bytes_read``.
        prompt_found: tokens of prompts that the prefix cache had. ``tokens``: of answers. ``drafted``, ``accepted``:
            tokens that were drafted, and of them those that became part of the text.
    """

    sweeps: int = 0
    units: int = 0
    misses: int = 0
    bytes_read: int = 0
    read_s: float = 0.0
    stall_s: float = 0.0
    ranks_s: float = 0.0
    rows_read: int = 0
    experts: ExpertCounters = field(default_factory=ExpertCounters)
    prompt_found: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    clock: Callable[[], float] = time.perf_counter
    _reads: _UnderWay = field(default_factory=_UnderWay, repr=False)

    def read_started(self) -> None:
        reads = self._reads
        with reads.lock:
            if reads.count == 0:
                reads.since = self.clock()
            reads.count += 1

    def read_ended(self, nbytes: int) -> None:
        reads = self._reads
        with reads.lock:
            self.bytes_read += nbytes
            reads.count -= 1
            if reads.count == 0:
                self.read_s += self.clock() - reads.since

    def reading(self) -> tuple[int, float]:
        """Bytes read, and seconds with a read under way, one that has not ended included."""
        reads = self._reads
        with reads.lock:
            return self.bytes_read, self.read_s + (self.clock() - reads.since if reads.count else 0.0)

    @property
    def read_gbps(self) -> float:
        """Bytes read per second of reading, in units of 1e9; 0 when nothing was read."""
        nbytes, seconds = self.reading()
        return nbytes / seconds / 1e9 if seconds > 0 else 0.0

    def reset(self) -> None:
        """Count from zero again; a read under way counts from now on."""
        with self._reads.lock:
            for counter in fields(self):
                if counter.default == 0:
                    setattr(self, counter.name, counter.default)
            self.experts = ExpertCounters()
            self._reads.since = self.clock()
