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
class RankStage:
    """What a rank's device computes at one go. Seconds of computing, for each pass, and of reading before that (0: it
    is in memory)."""

    rank: int
    compute_s: float
    read_s: float = 0.0


class _Ranks:
    """When each rank's disk and device are free, and its slots."""

    def __init__(self, slots: Sequence[int]) -> None:
        self._slots = slots
        self._disk = [0.0] * len(slots)
        self._device = [0.0] * len(slots)
        self._done: list[list[float]] = [[] for _ in slots]

    def turn(self, stage: RankStage, arrived: list[float], hop_s: float) -> list[float]:
        """When each pass has been computed, whose inputs ``arrived`` where they were computed."""
        rank, read = stage.rank, 0.0
        if stage.read_s > 0:
            done = self._done[rank]
            free = done[-self._slots[rank]] if len(done) >= self._slots[rank] else 0.0
            read = self._disk[rank] = max(self._disk[rank], free) + stage.read_s
        ends = []
        for at in arrived:
            self._device[rank] = max(at + hop_s, self._device[rank], read) + stage.compute_s
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
            turns[-1] = RankStage(stage.rank, before.compute_s + stage.compute_s, stage.read_s)
        else:
            turns.append(stage)
    return turns


def rank_sweep_s(stages: Sequence[RankStage], slots: Sequence[int], hop_s: float, passes: int = 1) -> float:
    """Seconds of a sweep in the steady state.

    Args:
        stages: of one sweep, in order; the first rank chooses tokens behind the last.
        slots: of each rank's ring.
        hop_s: from one rank to another.
        passes: that share a sweep, and follow each other over the ranks.
    """
    ranks, ends, turns = _Ranks(slots), [0.0], _turns(stages)
    now = 0.0
    for _ in range(BEFORE + COUNTED):
        # All ranks are told of a token.
        arrived, at = [now + hop_s] * passes, 0
        for stage in turns:
            arrived = ranks.turn(stage, arrived, hop_s if stage.rank != at else 0.0)
            at = stage.rank
        now = arrived[-1] + (hop_s if at else 0.0)
        ends.append(now)
    return (ends[-1] - ends[-1 - COUNTED]) / COUNTED
