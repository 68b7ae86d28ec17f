"""Before a model is loaded: what its plan rests on is measured again, where others disturbed it and are still now."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from ..calibration.calibrate import Progress, kinds_of, measure_kinds, store_calibration
from ..calibration.compute import PROMPT_TOKENS
from ..calibration.renewal import BRIEF_S, Brief, due, is_quiet, renewed_note
from ..errors import CalibrationError
from ..options import LoadOptions
from ..plan.certainty import unsure
from ..plan.machine_profile import Calibration
from .preparation import Preparation, prepare


def renewed(
    prepared: Preparation,
    model_path: str | Path,
    o: LoadOptions,
    progress: Progress,
    quiet: Callable[[], bool] = is_quiet,
) -> tuple[Preparation, tuple[str, ...]]:
    """The model as prepared, or anew where what its plan rests on could be measured more quietly; and a line that says
    so. In seconds, and within the plan's budget."""
    known, checkpoint = prepared.calibration, prepared.profile.lazy.checkpoint
    if not known.measured or not prepared.plan.streams or prepared.mirrors:
        # With mirrors it is of several disks together, and none of them was measured so.
        return prepared, ()
    found, note = _briefly(prepared, known, checkpoint.files, progress, quiet)
    if note is None:
        return prepared, ()
    with contextlib.suppress(CalibrationError):  # it is measured again the next time
        store_calibration(checkpoint.folder, prepared.cpu_streams, found)
    return prepare(model_path, o), (note,)


def _briefly(
    prepared: Preparation, known: Calibration, files: Sequence[Path], progress: Progress, quiet: Callable[[], bool]
) -> tuple[Calibration, str | None]:
    """The calibration, and the line; None where nothing was to be measured, or could be."""
    kinds, began = kinds_of(prepared), time.perf_counter()
    what = due(known, kinds, quiet, time.time())
    if not what:
        return known, None
    budget, step = prepared.plan.budget_bytes, max(PROMPT_TOKENS, default=1)
    room = budget - prepared.profile.size.activations(step)
    layers = partial(measure_kinds, prepared, budget_s=BRIEF_S, progress=progress, most_bytes=room)
    again = Brief(files, prepared.cpu_streams, budget // 2, layers).again(known, what)
    done = [each for each in what if each not in unsure(again, kinds)]
    return again, renewed_note(known, kinds, done, time.perf_counter() - began) if done else None
