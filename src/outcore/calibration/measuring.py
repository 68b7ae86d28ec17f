"""Interface to the package that measures this machine (entry point group ``calibration``)."""

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
        """Returns the calibration of this machine, the disk of ``folder`` and a model's layers; measures and stores
        what is missing. The second value names what was measured."""


def measuring() -> Measuring:
    """Returns the module that measures.

    Raises:
        CalibrationError: no package provides one.
    """
    for module in modules("calibration").values():
        return cast(Measuring, module)
    raise CalibrationError("nothing here measures a machine: the package outcore_calibrate is missing; install it")
