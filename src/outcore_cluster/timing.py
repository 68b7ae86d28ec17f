"""Measures how long messages take between rank 0 and each other rank when a run begins, and simulates the rings of
several ranks: how long a pass takes if layers lie on several machines.

A unit is read once its rank's disk and one of its rank's slots are free. It is computed once it is read, its rank's
device is free, and the layer before it, on any rank, was computed and sent.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
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


# Simulated passes that are left out, until the rings are in step, and the passes after them that are averaged.
BEFORE, COUNTED = 3, 2


@dataclass(frozen=True)
class RankStage:
    """One layer, or several that a rank computes without a pause.

    Attributes:
        compute_s: seconds of computing, for each pass that shares the reading. ``read_s``: of reading; 0: in memory.
        sent: bytes that each of these passes sends to the next rank.
    """

    rank: int
    compute_s: tuple[float, ...]
    read_s: float = 0.0
    sent: tuple[int, ...] = ()


def steady_s(stages: Sequence[RankStage], slots: Sequence[int], link: LinkTimes) -> float:
    """Returns the seconds of a pass in the steady state. Arguments as of ``pass_ends``."""
    ends = pass_ends(stages, slots, link, BEFORE + COUNTED)
    return (ends[-1] - ends[-1 - COUNTED]) / COUNTED


def pass_ends(stages: Sequence[RankStage], slots: Sequence[int], link: LinkTimes, passes: int = 1) -> list[float]:
    """Returns the times at which ``passes`` passes over the layers end. The first begins at 0 with empty slots.

    Args:
        stages: the layers in the order of calls; their ``compute_s`` has as many passes as share a reading. At the end
            rank 0 chooses the tokens and sends them to the others.
        slots: number of slots of each rank's ring.
    """
    disk, device, sender = ([0.0] * len(slots) for _ in range(3))
    done: list[list[float]] = [[] for _ in slots]

    def hop(ready: list[float], source: int, to: int, sizes: Sequence[int]) -> None:
        for n in range(len(ready) if source != to else 0):
            sender[source] = max(sender[source], ready[n]) + (sizes[n] / link.rate if sizes else 0.0)
            ready[n] = sender[source] + link.latency_s

    ends, turns = [0.0], _turns(stages)
    for _ in range(passes):
        ready, at, sizes = [ends[-1]] * len(stages[0].compute_s), 0, tuple[int, ...]()
        for turn in turns:
            hop(ready, at, turn.rank, sizes)
            at, sizes, read, before = turn.rank, turn.sent, 0.0, done[turn.rank]
            if turn.read_s > 0:
                free = before[-slots[at]] if len(before) >= slots[at] else 0.0
                read = disk[at] = max(disk[at], free) + turn.read_s
            for n, compute_s in enumerate(turn.compute_s):
                ready[n] = device[at] = max(ready[n], device[at], read) + compute_s
            if turn.read_s > 0:
                before.append(ready[-1])
        hop(ready, at, 0, sizes)
        ends.append(ready[-1])
    return ends[1:]


def _turns(stages: Sequence[RankStage]) -> list[RankStage]:
    """Joins layers that a rank computes without a pause: layers in memory, and the streamed layer after them."""
    turns: list[RankStage] = []
    for stage in stages:
        before = turns[-1] if turns else None
        if before is not None and before.rank == stage.rank and not before.read_s:
            compute = tuple(a + b for a, b in zip(before.compute_s, stage.compute_s, strict=True))
            turns[-1] = RankStage(stage.rank, compute, stage.read_s, stage.sent)
        else:
            turns.append(stage)
    return turns
