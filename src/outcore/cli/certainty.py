"""What the commands that predict say of the measurements behind it: their age, others' load meanwhile, their spread."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from ..machine.neighbours import BUSY
from ..plan.certainty import basis
from ..plan.machine_profile import Calibration

UNITS = (("day", 86400), ("hour", 3600), ("minute", 60), ("second", 1))


def certainty_record(calibration: Calibration, kinds: Iterable[str]) -> dict[str, Any]:
    """Under the names of the design's JSON: seconds, shares; None for what is not known."""
    if not calibration.measured:
        return dict.fromkeys(("calibration_age_s", "calibration_load", "compute_spread", "read_spread"))
    known = basis(calibration, kinds)
    age = known.age_s(time.time())
    return {
        "calibration_age_s": _rounded(age, 1),
        "calibration_load": _rounded(known.load, 3),
        "compute_spread": _rounded(known.compute_spread, 3),
        "read_spread": _rounded(known.read_spread, 3),
    }


def conditions_line(record: dict[str, Any]) -> str:
    """The same as a line for the user."""
    load = record["calibration_load"]
    others = "an unknown share" if load is None else f"{100 * load:.0f} %"
    named = {"computing": record["compute_spread"], "the disk": record["read_spread"]}
    spreads = ", ".join(f"{100 * spread:.0f} % ({name})" for name, spread in named.items() if spread is not None)
    line = f"This machine was measured {age_text(record['calibration_age_s'])}; others used {others} of its cores"
    line += f"; repeats differed by {spreads}." if spreads else "."
    again = " It is measured again when they are still: by outcore plan, or as a model is loaded."
    return line + (again if load is not None and load >= BUSY else "")


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def age_text(seconds: float | None) -> str:
    """Such as ``3 hours ago``."""
    if seconds is None:
        return "at an unknown time"
    for unit, length in UNITS:
        count = int(seconds // length)
        if count:
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"
