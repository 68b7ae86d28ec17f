"""The ring in numbers: how long a sweep takes when units are read in order, a few slots ahead of their computing.

Not a maximum of reading and computing: a unit can be read only when a slot is free, and a slot is free only when what
was read into it has been computed. Where units differ in size, or residents lie between them, one waits for the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SWEEPS = 3
"""Sweeps that are simulated after those that full slots hold already; the last one counts, when the ring is in step."""


@dataclass(frozen=True)
class Stage:
    """What the device computes at one go: seconds of computing, and of reading before that (0: it is in memory)."""

    compute_s: float
    read_s: float = 0.0


@dataclass(frozen=True)
class Timing:
    """One sweep in the steady state, and the first one, which starts with its slots full. Seconds."""

    sweep_s: float
    first_s: float


def simulate(
    stages: Sequence[Stage],
    slots: int,
    *,
    read_slowdown: float = 1.0,
    compute_slowdown: float = 1.0,
) -> Timing:
    """Run ``stages`` again and again through a ring of ``slots`` slots.

    Reads follow each other at the disk's rate; computing follows in order; each may slow the other down while both
    are under way. A slot is free again when its unit has been computed, which the loop sees at once: it waits for the
    device whenever it waits for the disk.

    Args:
        stages: of one sweep, in order.
        read_slowdown, compute_slowdown: how much longer each takes while the other runs.
    """
    reads = [s.read_s for s in stages if s.read_s > 0]
    if not reads:
        total = sum(s.compute_s for s in stages)
        return Timing(total, total)
    sweeps = SWEEPS + slots // len(reads)
    now = 0.0
    # Reads that have ended, and slots given back, since the beginning. The ring was full when it began.
    read, freed = slots, 0
    reading = reads[read % len(reads)]
    ends: list[float] = []
    for _ in range(sweeps):
        taken = 0
        for stage in stages:
            streamed = stage.read_s > 0
            turn = len(ends) * len(reads) + taken
            while streamed and read <= turn:
                # The device waits for the disk.
                now += reading
                read, reading = _next(read, reads)
            left = stage.compute_s
            while left > 0 and read < freed + slots:
                # Both work: until the read or the computing ends.
                if reading * read_slowdown <= left * compute_slowdown:
                    step = reading * read_slowdown
                    left -= step / compute_slowdown
                    read, reading = _next(read, reads)
                else:
                    step = left * compute_slowdown
                    reading -= step / read_slowdown
                    left = 0.0
                now += step
            now += max(0.0, left)
            if streamed:
                taken += 1
                freed += 1
        ends.append(now)
    # Slots that were full at first may take many sweeps to run dry where reading takes hardly longer than computing.
    return Timing(max(ends[-1] - ends[-2], sum(reads)), ends[0])


def _next(read: int, reads: Sequence[float]) -> tuple[int, float]:
    return read + 1, reads[(read + 1) % len(reads)]
