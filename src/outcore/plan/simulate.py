"""The ring in numbers: how long a sweep takes when units are read in order, a few slots ahead of their computing.

Not a maximum of reading and computing: a unit can be read only when a slot is free, and a slot is free only when what
was read into it has been computed. Where units differ in size, or residents lie between them, one waits for the other.
And where one takes longer than others of its size, by chance, so does the other: the more, the fewer slots there are.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice
from operator import attrgetter, itemgetter

BEFORE, PAIRS = 3, 2
"""Sweeps that are simulated after those that full slots hold already, until the ring is in step; and pairs of sweeps
that count after those. What one of a pair takes more, the other takes less, so that all of them together read and
compute as long as they would without chance."""


@dataclass(frozen=True)
class Stage:
    """What the device computes at one go: seconds of computing, and of reading before that (0: it is in memory)."""

    compute_s: float
    read_s: float = 0.0


@dataclass(frozen=True)
class Timing:
    """Seconds of one sweep in the steady state, and of the first one, which starts with its slots full."""

    sweep_s: float
    first_s: float


def simulate(stages: Sequence[Stage], slots: int, varying: float = 0.0) -> Timing:
    """Run ``stages`` again and again through a ring of ``slots`` slots.

    Reads follow each other at the disk's rate, computing follows in order. A slot is free again when its unit has been
    computed.

    Args:
        stages: of one sweep, in order.
        varying: share by which single reads, and computing of single units, take longer or less than on average, at
            most; below 1.
    """
    reads = [s.read_s for s in stages if s.read_s > 0]
    if not reads:
        total = sum(map(attrgetter("compute_s"), stages))
        return Timing(total, total)
    before, counted = BEFORE + slots // len(reads) - (not varying), 2 * PAIRS if varying else 1
    computes = [s.compute_s for s in stages]
    sweeps: list[tuple[Sequence[float], Sequence[float]]] = [(reads, computes)] * before
    sweeps += [_by_chance(reads, computes, n, varying) for n in range(counted + slots // len(reads) + 1)]
    # The ring is full in the beginning: the first read is of what comes so many units later.
    coming = islice(chain.from_iterable(map(itemgetter(0), sweeps)), slots, None)
    ready = deque([0.0] * slots)  # when each slot has been read into, in the order of units
    device = disk = 0.0  # when they are free
    marks = []
    for _, taken in sweeps[: before + counted]:
        for stage, compute_s in zip(stages, taken, strict=True):
            if stage.read_s > 0:
                device = max(device, ready.popleft()) + compute_s
                disk = max(disk, device) + next(coming)
                ready.append(disk)
            else:
                device += compute_s
        marks.append(device)
    # Slots that were full at first may take many sweeps to run dry where reading takes hardly longer than computing.
    return Timing(max((marks[-1] - marks[before - 1]) / counted, sum(reads)), marks[0])


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
