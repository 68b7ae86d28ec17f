"""Rings of several ranks in numbers: how long a sweep takes when layers lie on several machines.

A unit is read when its rank's disk and one of its slots are free, and computed when it is read, its rank's device is
free and the layer before it, wherever that is, has been computed and sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

BEFORE, COUNTED = 3, 2
"""Sweeps until the rings are in step, and those whose mean counts."""


@dataclass(frozen=True)
class LinkTimes:
    """What the link between ranks does, measured from rank 0 to each.

    Attributes:
        latency_s: from one rank's call to the other's, of a few bytes; by rank, of rank 0 itself 0.
        rate: bytes a second.
    """

    latency_s: tuple[float, ...]
    rate: tuple[float, ...]

    @classmethod
    def same(cls, ranks: int, latency_s: float, rate: float = 1e12) -> LinkTimes:
        """A link that is the same between all."""
        return cls((latency_s,) * ranks, (rate,) * ranks)

    def latency(self, a: int, b: int) -> float:
        """Seconds from one rank to another, of a few bytes: those of the slower one's."""
        return max(self.latency_s[a], self.latency_s[b])

    def sending_s(self, a: int, b: int, nbytes: int) -> float:
        """Seconds in which so many bytes leave a rank."""
        return nbytes / min(self.rate[a], self.rate[b])

    def hop_s(self, nbytes: int) -> float:
        """Seconds of a hop between the two that take the longest."""
        return max(self.latency_s, default=0.0) + nbytes / min(self.rate, default=1e12)


@dataclass(frozen=True)
class RankStage:
    """What a rank's device computes at one go.

    Attributes:
        compute_s: seconds of each pass. read_s: seconds of reading before that (0: it is in memory).
        sent: bytes of each pass that go to the rank that goes on, if it is another; none: next to nothing.
    """

    rank: int
    compute_s: tuple[float, ...]
    read_s: float = 0.0
    sent: tuple[int, ...] = ()


@dataclass(frozen=True)
class RankTiming:
    """Seconds of a sweep in the steady state, and of the first one, which begins with empty slots."""

    sweep_s: float
    first_s: float


class _Ranks:
    """When each rank's disk, device and sender are free, and its slots."""

    def __init__(self, slots: Sequence[int], link: LinkTimes) -> None:
        self._slots, self._link = slots, link
        self._disk = [0.0] * len(slots)
        self._device = [0.0] * len(slots)
        self._sender = [0.0] * len(slots)
        self._done: list[list[float]] = [[] for _ in slots]

    def sent(self, ends: Sequence[float], source: int, to: int, sizes: Sequence[int]) -> list[float]:
        """When each pass's outputs have arrived, which were computed at ``ends``."""
        if source == to:
            return list(ends)
        arrived = []
        for n, end in enumerate(ends):
            sending = self._link.sending_s(source, to, sizes[n]) if sizes else 0.0
            self._sender[source] = max(self._sender[source], end) + sending
            arrived.append(self._sender[source] + self._link.latency(source, to))
        return arrived

    def turn(self, stage: RankStage, arrived: Sequence[float]) -> list[float]:
        """When each pass has been computed, whose inputs have ``arrived``."""
        rank, read = stage.rank, 0.0
        if stage.read_s > 0:
            done = self._done[rank]
            free = done[-self._slots[rank]] if len(done) >= self._slots[rank] else 0.0
            read = self._disk[rank] = max(self._disk[rank], free) + stage.read_s
        ends = []
        for at, compute_s in zip(arrived, stage.compute_s, strict=True):
            self._device[rank] = max(at, self._device[rank], read) + compute_s
            ends.append(self._device[rank])
        if stage.read_s > 0:
            self._done[rank].append(ends[-1])
        return ends


def _turns(stages: Sequence[RankStage]) -> list[RankStage]:
    """What is computed at one go: layers in memory with the streamed one behind them, or all that follow each other."""
    turns: list[RankStage] = []
    for stage in stages:
        before = turns[-1] if turns else None
        if before is not None and before.rank == stage.rank and not before.read_s:
            compute = tuple(a + b for a, b in zip(before.compute_s, stage.compute_s, strict=True))
            turns[-1] = RankStage(stage.rank, compute, stage.read_s, stage.sent)
        else:
            turns.append(stage)
    return turns


def rank_timing(stages: Sequence[RankStage], slots: Sequence[int], link: LinkTimes) -> RankTiming:
    """Seconds of sweeps that follow each other.

    Args:
        stages: of one sweep, in order, all of as many passes, which follow each other over the ranks; the first rank
            chooses tokens behind the last, and tells the others.
        slots: of each rank's ring.
    """
    ranks, ends, turns = _Ranks(slots, link), [0.0], _turns(stages)
    for _ in range(BEFORE + COUNTED):
        ready, at, sizes = [ends[-1]] * len(stages[0].compute_s), 0, tuple[int, ...]()
        for stage in turns:
            ready = ranks.turn(stage, ranks.sent(ready, at, stage.rank, sizes))
            at, sizes = stage.rank, stage.sent
        ends.append(ranks.sent(ready, at, 0, sizes)[-1])
    return RankTiming((ends[-1] - ends[-1 - COUNTED]) / COUNTED, ends[1])
