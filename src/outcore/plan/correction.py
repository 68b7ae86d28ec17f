"""What runs have shown of a model beside what its calibration foresaw, and how far a prediction is corrected by it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import exp, log
from statistics import median

from ..machine.neighbours import BUSY
from .machine_profile import Calibration, Correction
from .plan import Plan
from .simulate import Timing

LAYERS, PARTS = "layers", "parts"
"""Kinds of plans that are corrected each by its own runs: whole layers are streamed, or parts of them."""

LEAST_SWEEPS = 8
"""Sweeps of a run that say something."""

LAST = 5
"""Runs that count, of each kind of plan: the last ones."""

FIRST, MOST = 1.15, 1.5
"""By how much a single run, and any number of them, may correct. A single one counts by half, of two the one that says
less, of more the middle one: one that was disturbed without being noticed changes little, or nothing."""

SEEN = 2.0
"""By how much one run may differ from what was foreseen and still be believed to that extent."""

WORKED, STALLED = 0.3, 0.05
"""Shares of a sweep from which on it says something of computing, and, waiting for the disk, of reading."""


@dataclass(frozen=True)
class Swept:
    """A sweep for one token, as a run has shown it: seconds in all, those of waiting for the disk, and those with a
    read under way."""

    seconds: float
    stall_s: float
    reading_s: float


@dataclass(frozen=True)
class KeptRun:
    """What was kept of one run.

    Attributes:
        at: when it ended, seconds since 1970.
        how: the kind of plan.
        sweeps: that were counted.
        load: share of all cores that others used meanwhile; None where the system does not say.
        seconds, predicted_s: of a sweep, measured and as the calibration alone foresaw it.
        compute, read: times as long as the calibration foresaw; None where the run says nothing of it.
    """

    at: float
    how: str
    sweeps: int
    load: float | None
    seconds: float
    predicted_s: float
    compute: float | None
    read: float | None

    @property
    def undisturbed(self) -> bool:
        """Whether it counts."""
        return self.load is None or self.load < BUSY


def kind_of(plan: Plan) -> str | None:
    """By which runs a plan is corrected; None for those that are not: nothing is streamed, or experts one by one."""
    if not plan.streamed or plan.pools:
        return None
    return PARTS if plan.split else LAYERS


def attributed(seen: Swept, foreseen: Callable[[float, float], Timing]) -> tuple[float | None, float | None]:
    """Times that computing and reading took as long as was foreseen, so that together they explain the sweep.

    Args:
        foreseen: a sweep where they take so many times as long.
    """
    expected = foreseen(1.0, 1.0)
    worked, working = seen.seconds - seen.stall_s, expected.sweep_s - expected.stall_s
    compute = worked / working if worked >= WORKED * seen.seconds and working > 0 else None
    read = (
        seen.reading_s / expected.reading_s if seen.stall_s >= STALLED * seen.seconds and expected.reading_s else None
    )
    for _ in range(8):
        compute, read = _within(compute, SEEN), _within(read, SEEN)
        # What is left is neither's alone: where they overlap less, both take longer.
        more = seen.seconds / foreseen(compute or 1.0, read or 1.0).sweep_s
        compute, read = (None if each is None else each * more for each in (compute, read))
    return believed(compute), believed(read)


def _within(value: float | None, most: float) -> float | None:
    return None if value is None else min(most, max(1 / most, value))


def believed(value: float | None) -> float | None:
    """What one run has shown, as far as it is believed."""
    return _within(value, SEEN)


def corrections(runs: Iterable[KeptRun], since: float) -> dict[str, Correction]:
    """What is corrected, by kind of plan.

    Args:
        since: when the machine was measured: what was seen before is beside something else.
    """
    found = {}
    counted = [run for run in sorted(runs, key=lambda run: run.at) if run.at > since and run.undisturbed]
    for how in (LAYERS, PARTS):
        mine = [run for run in counted if run.how == how][-LAST:]
        if mine:
            compute = settled([run.compute for run in mine if run.compute is not None])
            read = settled([run.read for run in mine if run.read is not None])
            found[how] = Correction(compute, read, len(mine))
    return found


def settled(values: Sequence[float]) -> float:
    """What some runs say together; see ``FIRST``."""
    logs = [log(v) for v in values]
    if not logs:
        return 1.0
    if len(logs) == 1:
        value, most = logs[0] / 2, log(FIRST)
    elif len(logs) == 2:
        value, most = (min(logs, key=abs) if logs[0] * logs[1] > 0 else 0.0), log(MOST)
    else:
        value, most = median(logs), log(MOST)
    return exp(min(most, max(-most, value)))


def measured_at(calibration: Calibration, kinds: Iterable[str]) -> float:
    """When the last of what a model's predictions rest on was measured; 0 where nobody wrote it down."""
    there = [calibration.disk_conditions, *(calibration.kind_conditions.get(kind) for kind in kinds)]
    return max((c.at for c in there if c is not None), default=0.0)
