"""How long it takes from one rank to another, measured between rank 0 and each of the others when a run begins."""

from __future__ import annotations

import json
import statistics
import time
import weakref
from collections.abc import Callable
from dataclasses import asdict, replace

from .link.link import Link
from .timing import LinkTimes

SMALL, LARGE = 64, 1_000_000
"""Bytes of a message that tells of latency, and of one that tells of the rate."""

SMALL_ROUNDS, LARGE_ROUNDS = 24, 4
PEERS_S = 0.4
"""Seconds in all, after which no further message is sent that need not be."""

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
        for size in (SMALL, LARGE):
            _answer(link, bytearray(size))
        times = LinkTimes((), ())
    else:
        share = PEERS_S / max(1, link.size - 1)
        times = LinkTimes((0.0,), (MOST,))
        for peer in range(1, link.size):
            latency = _round_trips(link, peer, SMALL, SMALL_ROUNDS, share / 4, clock) / 2
            large = _round_trips(link, peer, LARGE, LARGE_ROUNDS, share / 2, clock) / 2
            rate = min(MOST, LARGE / max(large - latency, LARGE / MOST))
            times = replace(times, latency_s=(*times.latency_s, latency), rate=(*times.rate, rate))
    told = json.loads(link.agree(json.dumps(asdict(times)).encode()))
    return LinkTimes(tuple(told["latency_s"]), tuple(told["rate"]))


def _round_trips(link: Link, peer: int, size: int, rounds: int, most_s: float, clock: Callable[[], float]) -> float:
    """Seconds of the middle one. Its first byte tells the peer whether another one follows."""
    took: list[float] = []
    began = clock()
    while True:
        # Of the first nothing counts: threads wake up, and windows open.
        last = len(took) > rounds or (len(took) > 1 and clock() - began > most_s)
        message, back = memoryview(bytearray([not last]) * size), memoryview(bytearray(size))
        sent = clock()
        arrival = link.receive(peer, back)
        link.send(peer, message)
        arrival.wait()
        took.append(clock() - sent)
        link.flush()
        if last:
            return statistics.median(took[1:])


def _answer(link: Link, message: bytearray) -> None:
    while True:
        link.receive(0, memoryview(message)).wait()
        link.send(0, memoryview(bytes(message)))
        link.flush()
        if not message[0]:
            return
