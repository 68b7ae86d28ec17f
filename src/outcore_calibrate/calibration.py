"""Measures this machine in seconds, and stores the result for each machine and disk."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from outcore.calibration.calibration_file import load_calibration, store_calibration
from outcore.disk import disk_calls
from outcore.disk.layout import Extent
from outcore.engine.model_profile import ModelProfile
from outcore.errors import CalibrationError, OutcoreError
from outcore.machine.allocator import clear_cache
from outcore.machine.cache_folder import cache_dir
from outcore.plan.machine_profile import Calibration

from .disk_rate import ENOUGH_BYTES, Bench, UnreadRanges, best_setting, disk_of, own_files, scratch_file
from .layer_times import Progress, decode_gbps, product_gbps, rig, sync_seconds, times_of

# Called with a line for the user that says what could not be measured, and why.
Note = Callable[[str], None]

# Seconds of a pass by kind of layer and number of tokens, as in ``Calibration``.
Kinds = dict[str, dict[int, float]]


def calibrated(
    profile: ModelProfile | None,
    folder: Path,
    cpu_streams: int,
    *,
    force: bool = False,
    progress: Progress = lambda *_: None,
    note: Note = lambda _: None,
) -> tuple[Calibration, tuple[str, ...]]:
    """Returns the calibration of this machine, the disk of ``folder`` and the model; measures what is missing.

    Args:
        profile: of a model that is opened and not loaded; left unchanged. None: measure only the disk.
        folder: the model's folder, or a folder on the disk to measure; only read.
        cpu_streams: number of streams over which linear layers are split on the CPU; 1 on a GPU.

    Returns:
        The calibration, which is also stored, and what was measured now: ``disk``, ``layers``.

    Raises:
        CalibrationError: there is no model, and no scratch file can be written on that disk.
        ReadError: the model's files cannot be read.
    """
    known = None if force else load_calibration(folder, cpu_streams)
    kinds, measured = dict[str, dict[int, float]](), list[str]()
    if profile is not None and (known is None or profile.size.kinds - known.kinds.keys()):
        kinds, measured = measure_kinds(profile, cpu_streams, progress=progress, note=note), ["layers"]
    if known is None:
        layers = profile.size.layers if profile is not None else ()
        timed = [(layer.resident, kinds[layer.kind][1]) for layer in layers if 1 in kinds.get(layer.kind, {})]
        try:
            with _ranges(profile, folder, progress) as unread:
                disk = best_setting(Bench(unread), progress)
            measured.insert(0, "disk")
        except CalibrationError as e:
            if profile is None:
                raise
            disk = Calibration()
            note(f"the disk was not measured, {disk.read_gbps:g} GB/s are assumed: {e}")
        known = replace(
            disk,
            sync_s=sync_seconds(),
            weight_gbps=sum(n for n, _ in timed) / sum(s for _, s in timed) / 1e9 if timed else product_gbps(),
            decode_gbps=decode_gbps(),
        )
        clear_cache()
    if measured:
        known = replace(known, kinds={**known.kinds, **kinds})
        store_calibration(folder, cpu_streams, known)
    return known, tuple(measured)


def measure_kinds(
    profile: ModelProfile, cpu_streams: int, *, progress: Progress = lambda *_: None, note: Note = lambda _: None
) -> Kinds:
    """Returns seconds of a pass by kind of layer and number of tokens; empty, after a note, if the model cannot run."""
    try:
        with rig(profile, cpu_streams) as made:
            return times_of(made, sync_seconds(), progress=progress)
    except OutcoreError as e:
        note(str(e))
    except Exception as e:  # a model's code may raise anything; the disk can still be measured
        text = " ".join(str(e).split()) or type(e).__name__
        note(f"this model's layers could not be measured: {text[:200]}")
    return {}


@contextlib.contextmanager
def _ranges(profile: ModelProfile | None, folder: Path, progress: Progress) -> Iterator[UnreadRanges]:
    """Yields ranges of files to read: of the model's files or, if these are too small, of a scratch file."""
    files = tuple(profile.lazy.checkpoint.files) if profile is not None else ()
    if sum(f.stat().st_size for f in files) >= ENOUGH_BYTES and not disk_calls.system().cache_first:
        yield own_files(files)
        return
    progress("writing a scratch file", 0, 1)
    with scratch_file(cache_dir(), disk_of(files[0] if files else folder)) as path:
        yield UnreadRanges([Extent(path, 0, path.stat().st_size, 0, in_place=True)])
