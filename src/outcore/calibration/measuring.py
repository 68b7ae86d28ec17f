"""Measuring this machine: the seam to the package that does, with a module of the group ``calibration``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol, cast

from ..engine.model_profile import ModelProfile
from ..errors import CalibrationError
from ..packages import modules
from ..plan.machine_profile import Calibration

Progress = Callable[[str, int, int], None]


class Measuring(Protocol):
    """What that module has."""

    def calibrated(
        self,
        profile: ModelProfile | None,
        folder: Path,
        cpu_streams: int,
        *,
        force: bool = False,
        progress: Progress = lambda *_: None,
        note: Callable[[str], None] = lambda _: None,
    ) -> tuple[Calibration, tuple[str, ...]]:
        """The calibration of this machine, of the disk that ``folder`` is on, and of a model's layers. What is not
        known is measured, and kept; the second value says what was."""


def measuring() -> Measuring:
    """The module that measures.

    Raises:
        CalibrationError: no package has one.
    """
    for module in modules("calibration").values():
        return cast(Measuring, module)
    raise CalibrationError("nothing here measures a machine: the package outcore_calibrate is missing; install it")
