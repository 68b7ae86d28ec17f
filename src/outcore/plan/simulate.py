"""The ring in numbers: how long a sweep takes when units are read in order, a few slots ahead of their computing.

Not a maximum of reading and computing: a unit can be read only when a slot is free, and a slot is free only when what
was read into it has been computed. Where units differ in size, or residents lie between them, one waits for the other.
And where one takes longer than others of its size, by chance, so does the other: the more, the fewer slots there are.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

SWEEPS = 3
"""Sweeps that are simulated after those that full slots hold already, until the ring is in step."""

PAIRS = 2
"""Pairs of sweeps that count after those, where times vary: what one of a pair takes more, the other takes less, so
that all of them together read and compute as long as they would without."""


@dataclass(frozen=True)
class Stage:
    """What the device computes at one go: seconds of computing, and of reading before that (0: it is in memory)."""

    compute_s: float
    read_s: float = 0.0


@dataclass(frozen=True)
class Timing:
    """One sweep in the steady state, and the first one, which starts with its slots full. Seconds.

    Attributes:
        stall_s: of a sweep in the steady state, the device waits for the disk. ``reading_s``: a read is under way.
    """

    sweep_s: float
    first_s: float
    stall_s: float = 0.0
    reading_s: float = 0.0


def simulate(
    stages: Sequence[Stage],
    slots: int,
    *,
    read_slowdown: float = 1.0,
    compute_slowdown: float = 1.0,
    varying: float = 0.0,
) -> Timing:
    """Run ``stages`` again and again through a ring of ``slots`` slots.

    Reads follow each other at the disk's rate; computing follows in order; each may slow the other down while both
    are under way. A slot is free again when its unit has been computed, which the loop sees at once: it waits for the
    device whenever it waits for the disk.

    Args:
        stages: of one sweep, in order.
        read_slowdown, compute_slowdown: how much longer each takes while the other runs.
        varying: share by which single reads, and computing of single units, take longer or less than on average, at
            most; below 1.
    """
    reads = [s.read_s for s in stages if s.read_s > 0]
    if not reads:
        total = sum(s.compute_s for s in stages)
        return Timing(total, total)
    before = SWEEPS + slots // len(reads) - (not varying)
    counted = 2 * PAIRS if varying else 1
    computes = [s.compute_s for s in stages]
    # Of every sweep, as single units take more or less in those that count; reads go on beyond the last.
    beyond = slots // len(reads) + 1
    sweeps = [(reads, computes)] * before + [_by_chance(reads, computes, n, varying) for n in range(counted + beyond)]
    read_s = [s for each, _ in sweeps for s in each]
    now = stalled = idle = 0.0
    # Reads that have ended, and slots given back, since the beginning. The ring was full when it began.
    read, freed, turn = slots, 0, 0
    reading = read_s[read]
    marks: list[tuple[float, float, float]] = []
    for _, compute_s in sweeps[: before + counted]:
        for stage, left in zip(stages, compute_s, strict=True):
            streamed = stage.read_s > 0
            while streamed and read <= turn:
                # The device waits for the disk.
                now += reading
                stalled += reading
                read += 1
                reading = read_s[read]
            while left > 0 and read < freed + slots:
                # Both work: until the read or the computing ends.
                if reading * read_slowdown <= left * compute_slowdown:
                    step = reading * read_slowdown
                    left -= step / compute_slowdown
                    read += 1
                    reading = read_s[read]
                else:
                    step = left * compute_slowdown
                    reading -= step / read_slowdown
                    left = 0.0
                now += step
            if left > 0:
                now += left
                idle += left
            if streamed:
                turn += 1
                freed += 1
        marks.append((now, stalled, idle))
    sweep_s, stall_s, idle_s = ((a - b) / counted for a, b in zip(marks[-1], marks[before - 1], strict=True))
    # Slots that were full at first may take many sweeps to run dry where reading takes hardly longer than computing.
    return Timing(max(sweep_s, sum(reads)), marks[0][0], stall_s, sweep_s - idle_s)


def _by_chance(
    reads: Sequence[float], computes: Sequence[float], sweep: int, varying: float
) -> tuple[Sequence[float], Sequence[float]]:
    """What reading and computing of single units takes in a sweep that counts: the same each time."""
    if not varying:
        return reads, computes
    pair, second = divmod(sweep, 2)
    share = -varying if second else varying
    shift, n = 37 * pair, len(_DRAWN)
    return (
        [s * (1.0 + share * _DRAWN[(place + shift) % n]) for place, s in enumerate(reads)],
        [s * (1.0 + share * _DRAWN[(shift - 1 - place) % n]) for place, s in enumerate(computes)],
    )


_DRAWN = [2 * random.Random(seed).random() - 1 for seed in range(499)]
