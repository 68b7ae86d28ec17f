"""How long it takes from one rank to another, measured between rank 0 and each of the others when a run begins."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from .link_protocol import Link

SMALL, LARGE = (64, 12), (250_000, 3)
"""Bytes of a message that tells of latency, and of one that tells of the rate; and how often each goes to and fro
behind a first one, of which nothing counts: threads wake up, and windows open."""

MOST = 1e12
"""Bytes a second of a link that took no time at all."""


@dataclass(frozen=True)
class LinkTimes:
    """The slowest link between two ranks: seconds from one's call to the other's, of a few bytes; bytes a second."""

    latency_s: float
    rate: float = MOST

    def hop_s(self, nbytes: int) -> float:
        """Seconds that so many bytes take from one rank to another."""
        return self.latency_s + nbytes / self.rate


def measure_link(link: Link, clock: Callable[[], float] = time.perf_counter) -> LinkTimes:
    """Send messages to and fro between rank 0 and each other rank, one after the other; the same on all ranks.

    Of latency half of the middle round trip counts, of the rate the middle of large ones beyond that.

    Raises:
        LinkError: a rank is gone.
    """
    latencies, rates = [0.0], [MOST]
    for peer in range(1, link.size) if link.rank == 0 else (0,):
        small, large = (_round_trip_s(link, peer, *way, clock) / 2 for way in (SMALL, LARGE))
        latencies.append(small)
        rates.append(LARGE[0] / max(large - small, LARGE[0] / MOST))
    return LinkTimes(*json.loads(link.agree(json.dumps([max(latencies), min(rates)]).encode())))


def _round_trip_s(link: Link, peer: int, size: int, rounds: int, clock: Callable[[], float]) -> float:
    """Seconds of the middle one, as rank 0 sees it; others answer."""
    message, back, took = memoryview(bytes(size)), memoryview(bytearray(size)), list[float]()
    for _ in range(1 + rounds):
        began = clock()
        arrival = link.receive(peer, back)
        if link.rank == 0:
            link.send(peer, message)
        arrival.wait()
        took.append(clock() - began)
        if link.rank:
            link.send(peer, message)
        link.flush()
    return statistics.median(took[1:])
