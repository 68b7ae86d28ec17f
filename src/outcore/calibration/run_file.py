"""What runs have shown, on disk: a JSON file of the same name as each calibration, with a few runs of each model."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from ..errors import StoreError
from ..machine.cache_folder import cache_dir, keep_document, require_own
from ..machine.small_files import parse_json, read_small
from ..plan.correction import LAST, LAYERS, PARTS, KeptRun, corrections, measured_at
from ..plan.machine_profile import Calibration
from .calibration_file import file_of, key_of

FORMAT, SCHEMA = "outcore-runs", 1
FOLDER = "runs"

MODELS = 64
"""That are remembered; the one goes whose last run was the longest ago."""

FILE_BYTES = 1_000_000

_MOST_S, _MOST_TIMES = 1e6, 1e3

Runs = dict[str, tuple[KeptRun, ...]]
_RUNS = TypeAdapter(Runs)


def runs_file(folder: Path, cpu_streams: int) -> Path:
    """Where they are kept for this machine and the disk that ``folder`` is on.

    Raises:
        OSError, StoreError: as ``key_of`` and ``file_of``.
    """
    return cache_dir() / FOLDER / file_of(key_of(folder, cpu_streams)).name


def load_runs(folder: Path, cpu_streams: int, model: str) -> tuple[KeptRun, ...]:
    """What earlier runs of a model have shown; none where nothing is known, or what is there cannot be. Raises nothing.

    Args:
        model: what tells models apart, and the dtypes that they are computed in.
    """
    try:
        path = runs_file(folder, cpu_streams)
        require_own(path.parent)
        return _read(path).get(model, ())
    except (OSError, StoreError, ValueError):
        return ()


def corrected(
    calibration: Calibration, folder: Path, cpu_streams: int, model: str, kinds: Sequence[str]
) -> Calibration:
    """The calibration with what runs of a model have shown since."""
    runs = load_runs(folder, cpu_streams, model)
    return replace(calibration, corrections=corrections(runs, measured_at(calibration, kinds))) if runs else calibration


def keep_run(folder: Path, cpu_streams: int, model: str, run: KeptRun) -> None:
    """Add a run to what is kept. Nothing is said where that cannot be written."""
    with contextlib.suppress(OSError, StoreError):
        path = runs_file(folder, cpu_streams)
        try:
            known = _read(path)
        except (OSError, ValueError):
            known = {}
        known[model] = _last((*known.get(model, ()), run))
        kept = sorted(known.items(), key=lambda item: max(r.at for r in item[1]))[-MODELS:]
        document = {
            "format": FORMAT,
            "schema": SCHEMA,
            "models": {name: [asdict(r) for r in runs] for name, runs in kept},
        }
        keep_document(path, document)


def _last(runs: Sequence[KeptRun]) -> tuple[KeptRun, ...]:
    """The last of each kind of plan, those that count and those that others disturbed."""
    kept: list[KeptRun] = []
    for how in (LAYERS, PARTS):
        for undisturbed in (True, False):
            mine = [r for r in runs if r.how == how and r.undisturbed is undisturbed]
            kept += sorted(mine, key=lambda r: r.at)[-LAST:]
    return tuple(sorted(kept, key=lambda r: r.at))


def _read(path: Path) -> Runs:
    """All models' runs.

    Raises:
        OSError: there is no such file.
        ValueError: it is damaged, or holds what cannot have been.
    """
    document = parse_json(read_small(path, FILE_BYTES), twins=False)
    if not isinstance(document, dict) or (document.get("format"), document.get("schema")) != (FORMAT, SCHEMA):
        raise ValueError("not a file of runs")
    models: Any = document.get("models")
    # As JSON again, as calibrations are: strict rules for Python's values know no tuples.
    found: Mapping[str, tuple[KeptRun, ...]] = _RUNS.validate_json(json.dumps(models), strict=True)
    if not all(_possible(run) for runs in found.values() for run in runs):
        raise ValueError("runs that cannot have been")
    return {model: runs for model, runs in found.items() if runs}


def _possible(run: KeptRun) -> bool:
    times = [each for each in (run.compute, run.read) if each is not None]
    return (
        run.how in (LAYERS, PARTS)
        and 0 < run.at < 1e12
        and 0 < run.sweeps < 1e12
        and (run.load is None or 0 <= run.load <= 1)
        and all(0 < s <= _MOST_S for s in (run.seconds, run.predicted_s))
        and all(1 / _MOST_TIMES <= each <= _MOST_TIMES for each in times)
    )
