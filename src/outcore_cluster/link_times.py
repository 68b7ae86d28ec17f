"""How long it takes from one rank to another, measured between rank 0 and each of the others when a run begins."""

from __future__ import annotations

import json
import statistics
import time
import weakref
from collections.abc import Callable

from .link_protocol import Link
from .timing import LinkTimes

SMALL, LARGE = (64, 12), (250_000, 3)
"""Bytes of a message that tells of latency, and of one that tells of the rate; and how often each goes to and fro
behind a first one, of which nothing counts: threads wake up, and windows open."""

MOST = 1e12
"""Bytes a second of a link that took no time at all."""

_known: weakref.WeakKeyDictionary[Link, LinkTimes] = weakref.WeakKeyDictionary()


def link_times(link: Link) -> LinkTimes:
    """What a link does, measured when this is asked first; all ranks ask at the same time.

    Raises:
        LinkError: a rank is gone.
    """
    if link not in _known:
        _known[link] = measure_link(link)
    return _known[link]


def measure_link(link: Link, clock: Callable[[], float] = time.perf_counter) -> LinkTimes:
    """Send messages to and fro between rank 0 and each other rank, one after the other; the same on all ranks.

    Of latency half of the middle round trip counts, of the rate the middle of large ones beyond that.
    """
    if link.rank:
        for way in (SMALL, LARGE):
            _round_trips(link, 0, *way, clock)
        told = json.loads(link.agree(b""))
    else:
        told = {"latency_s": [0.0], "rate": [MOST]}
        for peer in range(1, link.size):
            latency, large = (_round_trips(link, peer, *way, clock) / 2 for way in (SMALL, LARGE))
            told["latency_s"].append(latency)
            told["rate"].append(min(MOST, LARGE[0] / max(large - latency, LARGE[0] / MOST)))
        link.agree(json.dumps(told).encode())
    return LinkTimes(tuple(told["latency_s"]), tuple(told["rate"]))


def _round_trips(link: Link, peer: int, size: int, rounds: int, clock: Callable[[], float]) -> float:
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
