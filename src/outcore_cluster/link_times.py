"""Measures how long messages take between rank 0 and each other rank when a run begins."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from .link_protocol import Link

# Bytes and number of the messages that measure latency, and of those that measure the rate. One more round trip goes
# before, not counted: threads wake up during it, and TCP windows open.
SMALL, LARGE = (64, 12), (250_000, 3)

# Largest rate that is reported, in bytes per second.
MOST = 1e12


@dataclass(frozen=True)
class LinkTimes:
    """The slowest link of a run: seconds for a small message, and bytes per second of large ones."""

    latency_s: float
    rate: float = MOST

    def hop_s(self, nbytes: int) -> float:
        return self.latency_s + nbytes / self.rate


def measure_link(link: Link, clock: Callable[[], float] = time.perf_counter) -> LinkTimes:
    """Measures round trips between rank 0 and each other rank; all ranks call it at the same time. Latency is half of a
    small message's median round trip; the rate is a large message's bytes divided by its time beyond the latency."""
    latencies, rates = [0.0], [MOST]
    for peer in range(1, link.size) if link.rank == 0 else (0,):
        small, large = (_round_trip_s(link, peer, *way, clock) / 2 for way in (SMALL, LARGE))
        latencies.append(small)
        rates.append(LARGE[0] / max(large - small, LARGE[0] / MOST))
    return LinkTimes(*json.loads(link.agree(json.dumps([max(latencies), min(rates)]).encode())))


def _round_trip_s(link: Link, peer: int, size: int, rounds: int, clock: Callable[[], float]) -> float:
    """Returns the median seconds of ``rounds`` round trips. Rank 0 sends first, the other rank answers."""
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
