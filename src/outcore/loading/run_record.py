"""Each run is a measurement: what it shows beside what was foreseen is kept, and corrects what is foreseen next."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ..calibration.run_file import keep_run
from ..engine.session import Session
from ..engine.sweep_log import SweepLog
from ..plan.correction import KeptRun, attributed, kind_of
from ..plan.machine_profile import Calibration
from ..plan.model_size import ModelSize
from ..plan.prediction import token_timing
from ..plan.simulate import Timing
from .preparation import Preparation


def record_run(session: Session, prepared: Preparation) -> None:
    """Note what sweeps take, and keep it when the session is closed; where plans are corrected by it."""
    if (
        session.streaming is None
        or not session.transport.alone
        or not session.plan.calibrated
        or not prepared.calibration.measured
        or kind_of(session.plan) is None
        or prepared.profile.size.sequences > 1
    ):
        return
    log = SweepLog(session)
    session.streaming.before_sweep.join(log.begin)
    folder = prepared.profile.lazy.checkpoint.folder
    keep = _Keep(folder, prepared.cpu_streams, prepared.key, prepared.calibration, log)
    session.closing.join(partial(keep.run, weakref.ref(session)))


@dataclass(frozen=True)
class _Keep:
    folder: Path
    cpu_streams: int
    model: str
    calibration: Calibration
    log: SweepLog

    def run(self, of: weakref.ref[Session], clock: Callable[[], float] = time.time) -> None:
        """Keep what there is of a session, once."""
        session = of()
        if session is None or session.closed:
            return
        if (found := run_of(self.log, session.size, self.calibration, clock())) is not None:
            keep_run(self.folder, self.cpu_streams, self.model, found)


def run_of(log: SweepLog, size: ModelSize, calibration: Calibration, at: float) -> KeptRun | None:
    """What sweeps have shown beside what the calibration alone foresees; None where they were too few."""
    found = log.found()
    how = kind_of(log.plan)
    if found is None or how is None:
        return None
    swept, load = found
    plain = replace(calibration, corrections={})

    def foreseen(compute: float, read: float) -> Timing:
        return token_timing(size, log.plan, plain.slower(compute, read))

    compute, read = attributed(swept, foreseen)
    return KeptRun(at, how, log.sweeps, load, swept.seconds, foreseen(1.0, 1.0).sweep_s, compute, read)
