"""How sure a prediction is: a range of speeds from what is known of the calibration that it rests on. Numbers only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..machine.neighbours import BUSY
from ..text import counted
from .correction import kind_of
from .machine_profile import Calibration, Conditions
from .model_size import ModelSize
from .plan import Plan
from .prediction import predict

PREDICTION = 0.1
"""By how much predictions are off where the machine is as it was measured: median of predictions-cpu.json
and predictions-qwen3.5-9b-8bit-h200.json."""

UNKNOWN = 0.35
"""And where nobody wrote down how it was measured: the worst of those."""

ASSUMED = 1.0
"""And where it was not measured at all: half as fast, or twice."""

MUCH = 1.3
"""Computing or reading that takes so many times as long as when it was measured, or as little, is worth a line."""


@dataclass(frozen=True)
class Now:
    """The machine at the moment, beside what it was when it was measured.

    Attributes:
        compute, read: times that a reference takes now over those that it took then; None where there is none.
        load: share of all cores that others use.
    """

    compute: float | None = None
    read: float | None = None
    load: float | None = None


@dataclass(frozen=True)
class Basis:
    """What a prediction rests on. ``load``, ``spread``: the worst of all; ``at``: of the oldest. None: not known."""

    at: float | None
    load: float | None
    compute_spread: float | None
    read_spread: float | None

    @property
    def compute_error(self) -> float:
        """By how much seconds of computing may be off. Where others never stop, samples that agree prove little."""
        if self.compute_spread is None:
            return UNKNOWN
        busy = self.load is not None and self.load >= BUSY
        return max(PREDICTION + self.compute_spread, UNKNOWN if busy else 0.0)

    @property
    def read_error(self) -> float:
        """By how much seconds of reading may be off."""
        return UNKNOWN if self.read_spread is None else PREDICTION + self.read_spread

    def age_s(self, clock: float) -> float | None:
        """Seconds since then, which is never less than 0."""
        return None if self.at is None else max(0.0, clock - self.at)


def basis(calibration: Calibration, kinds: Iterable[str]) -> Basis:
    """What is known of the measurements of the disk and of these kinds of layers."""
    disk = calibration.disk_conditions
    layers = [calibration.kind_conditions.get(kind) for kind in kinds]
    there: list[Conditions] = [c for c in (disk, *layers) if c is not None]
    whole = len(there) == 1 + len(layers)
    loads = [c.load for c in there if c.load is not None]
    spreads = [c.spread for c in layers if c is not None]
    return Basis(
        at=min(c.at for c in there) if whole else None,
        load=max(loads) if whole and loads else None,
        compute_spread=max(spreads) if spreads and len(spreads) == len(layers) else None,
        read_spread=disk.spread if disk is not None else None,
    )


def unsure(calibration: Calibration, kinds: Iterable[str]) -> tuple[str, ...]:
    """What of a calibration others disturbed, or of what nobody wrote down how it was: of ``disk``, ``layers``."""
    layers = [calibration.kind_conditions.get(kind) for kind in kinds if kind in calibration.kinds]
    disturbed = {
        "disk": others_load(calibration.disk_conditions) >= BUSY,
        "layers": any(others_load(conditions) >= BUSY for conditions in layers),
    }
    return tuple(what for what, yes in disturbed.items() if yes)


def others_load(conditions: Conditions | None) -> float:
    """Share of the cores that others used; all of them where nobody wrote it down, none where the system does not
    say."""
    return 1.0 if conditions is None else conditions.load or 0.0


def token_seconds(size: ModelSize, plan: Plan, calibration: Calibration, known: Basis, now: Now) -> tuple[float, float]:
    """Seconds of a token at best and at worst: as sure as the calibration is, and as the machine is at the moment."""
    if not plan.calibrated:
        return plan.token_s / (1 + ASSUMED), plan.token_s * (1 + ASSUMED)
    compute, read = 1 + known.compute_error, 1 + known.read_error
    slow = calibration.slower(max(compute, now.compute or 1.0), max(read, now.read or 1.0))
    fast = calibration.slower(min(1 / compute, now.compute or 1.0), min(1 / read, now.read or 1.0))
    return predict(size, plan, fast).token_s, predict(size, plan, slow).token_s


def changes(now: Now, age: str, then: float | None) -> list[str]:
    """What differs by much now, as lines for the user.

    Args:
        age: of the calibration, as a phrase. then: share of the cores that others used when it was made.
    """
    lines = []
    wait = "wait until they are done, or " if now.load is not None and now.load >= BUSY else ""
    for what, ratio in (("computing", now.compute), ("reading", now.read)):
        if ratio is not None and (ratio > MUCH or ratio < 1 / MUCH):
            lines.append(
                f"{what} takes {ratio:.1f} times as long now as when this machine was measured {age}; others use "
                f"{_share(now.load)} of the cores now, {_share(then)} then: {wait if ratio > 1 else ''}measure again "
                "(outcore calibrate --force)"
            )
    return lines


CORRECTED = 0.02
"""What runs correct by more than that is worth a line."""


def corrected_by(plan: Plan, calibration: Calibration) -> list[str]:
    """What runs of the model have shown that is counted in, as a line for the user."""
    seen = calibration.corrections.get(kind_of(plan) or "")
    if seen is None or max(abs(seen.compute - 1), abs(seen.read - 1)) < CORRECTED:
        return []
    return [
        f"counted in is what {counted(seen.runs, 'run')} of this model showed: computing takes {seen.compute:.2f} "
        f"times as long as was measured, reading {seen.read:.2f} times"
    ]


def _share(load: float | None) -> str:
    return "an unknown share" if load is None else f"{100 * load:.0f} %"
