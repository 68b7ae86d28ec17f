"""Counters that the engine writes while it runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields


@dataclass
class ExpertCounters:
    """Counters of routed experts.

    Attributes:
        used: experts that calls needed, counted per call; ``read``: of these, cache misses that were read on demand.
        foreseen: experts that were prefetched (not in ``read``); ``wasted``: of these, experts that no call needed.
    """

    used: int = 0
    read: int = 0
    foreseen: int = 0
    wasted: int = 0

    @property
    def brought(self) -> int:
        return self.read + self.foreseen


class _UnderWay:
    def __init__(self) -> None:
        self.lock, self.count, self.since = threading.Lock(), 0, 0.0


@dataclass
class Metrics:
    """Counters of one streamed model since it was loaded, or since ``reset``.

    Attributes:
        sweeps: forward passes over the streamed units.
        units: streamed units computed; ``misses``: of these, units that were not prefetched and were read on demand.
        bytes_read: bytes read from files into slots, including rounding to blocks.
        read_s: seconds with at least one read in flight.
        stall_s, ranks_s: seconds that the computing thread waited for reads, and for other ranks.
        rows_read: embedding rows read one by one; their bytes are not in ``bytes_read``.
        prompt_found: prompt tokens found in the prefix cache. ``tokens``: generated tokens.
        drafted, accepted: proposed and accepted draft tokens.
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
        """Return ``bytes_read``, and ``read_s`` including the seconds since the read in flight began."""
        reads = self._reads
        with reads.lock:
            return self.bytes_read, self.read_s + (self.clock() - reads.since if reads.count else 0.0)

    @property
    def read_gbps(self) -> float:
        """GB (1e9 bytes) read per second with a read in flight; 0 if nothing was read."""
        nbytes, seconds = self.reading()
        return nbytes / seconds / 1e9 if seconds > 0 else 0.0

    def reset(self) -> None:
        """Set all counters to zero; a read in flight counts from now on."""
        with self._reads.lock:
            for counter in fields(self):
                if counter.default == 0:
                    setattr(self, counter.name, counter.default)
            self.experts = ExpertCounters()
            self._reads.since = self.clock()
