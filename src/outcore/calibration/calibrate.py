"""``outcore calibrate``: what this machine does, measured in seconds and kept for each machine and disk."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from ..checkpoint.packed_store import cache_dir
from ..disk import disk_calls
from ..disk.cold_ranges import ENOUGH_BYTES, UnreadRanges, disk_of, own_files, scratch_file
from ..disk.layout import Extent
from ..disk.mirrored_reader import Replica
from ..engine.model_profile import ModelProfile
from ..errors import CalibrationError, OutcoreError
from ..machine.allocator import clear_cache
from ..machine.hardware import cores
from ..plan.machine_profile import Calibration
from ..plan.plan import Plan
from ..sizes import format_size
from .calibration_file import load_calibration, store_calibration
from .compute import cast_gbps, decode_gbps, join_gbps, product_gbps, sync_seconds, times_of
from .disk import Bench, best_setting
from .random_model import rig


class Prepared(Protocol):
    """A model opened and planned for, and not loaded (``loading.preparation``)."""

    @property
    def profile(self) -> ModelProfile: ...

    @property
    def plan(self) -> Plan: ...

    @property
    def cpu_streams(self) -> int: ...


Progress = Callable[[str, int, int], None]
"""Called with what is being done, steps done, and steps in all."""

Note = Callable[[str], None]
"""Called with a line for the user: what could not be measured, and why."""

STEADY_S, LEAST_GBPS = 3.0, 1e-6
"""Seconds of reading by which a mirror's disk is judged, as a limit on its rate lets a short measurement pass more; and
what is said of one without a file."""

Kinds = dict[str, dict[int, float]]
"""As in ``Calibration``."""


def kinds_of(prepared: Prepared) -> set[str]:
    """The kinds of a model's layers, and of what lies outside of them."""
    size = prepared.profile.size
    return {layer.kind for layer in size.layers} | ({size.rest_kind} if size.layers else set())


def calibrated(
    prepared: Prepared | None,
    folder: Path,
    cpu_streams: int,
    *,
    force: bool = False,
    progress: Progress = lambda *_: None,
    note: Note = lambda _: None,
) -> tuple[Calibration, tuple[str, ...]]:
    """The calibration of this machine, the disk that ``folder`` is on, and the model: what is not known is measured.

    Returns:
        The calibration, kept for the next time; and what was measured now: ``disk``, ``layers``.

    Raises:
        CalibrationError, ReadError: as in ``calibrate``.
    """
    known, spoilt = load_calibration(folder, cpu_streams)
    if spoilt is not None:
        note(f"an earlier calibration was not used, and this measured again: {spoilt}")
    if known is None or force:
        known = calibrate(prepared, folder=folder, cpu_streams=cpu_streams, progress=progress, note=note)
        measured: tuple[str, ...] = ("disk", "layers") if prepared is not None else ("disk",)
    elif prepared is not None and kinds_of(prepared) - known.kinds.keys():
        known = replace(known, kinds={**known.kinds, **measure_kinds(prepared, progress=progress, note=note)})
        measured = ("layers",)
    else:
        return known, ()
    store_calibration(folder, cpu_streams, known)
    return known, measured


def calibrate(
    prepared: Prepared | None = None,
    *,
    folder: Path | None = None,
    cpu_streams: int | None = None,
    progress: Progress = lambda *_: None,
    note: Note = lambda _: None,
) -> Calibration:
    """Measure the disk that the model is on, and the model's layers. The model's folder is only ever read.

    Args:
        prepared: a model, opened and not loaded, which is left as it was. None: the disk alone.
        folder: on the disk to measure where there is no model; None: the cache folder.
        cpu_streams: as the model's, where there is none; None: one per core.

    Raises:
        CalibrationError: there is no model, and no scratch file can be written on that disk.
        ReadError: the model's files cannot be read.
    """
    streams = prepared.cpu_streams if prepared is not None else cpu_streams or cores()
    kinds = measure_kinds(prepared, progress=progress, note=note) if prepared is not None else {}
    with _ranges(prepared, folder, progress, note) as unread:
        disk = best_setting(Bench(unread), progress)
    layers = prepared.profile.size.layers if prepared is not None else ()
    known = [(layer.resident, kinds[layer.kind][1]) for layer in layers if 1 in kinds.get(layer.kind, {})]
    found = replace(
        disk,
        sync_s=sync_seconds(),
        weight_gbps=sum(n for n, _ in known) / sum(s for _, s in known) / 1e9 if known else product_gbps(),
        join_gbps=join_gbps(streams),
        decode_gbps=decode_gbps(),
        cast_gbps=cast_gbps(),
        kinds=kinds,
    )
    clear_cache()
    return found


def measure_kinds(prepared: Prepared, *, progress: Progress = lambda *_: None, note: Note = lambda _: None) -> Kinds:
    """Seconds of one pass by kind of layer and number of tokens; empty, with a note, where the model cannot be run.

    The model is left as it was.
    """
    try:
        with rig(prepared.profile, prepared.cpu_streams) as made:
            return times_of(made, sync_seconds(), progress=progress)
    except OutcoreError as e:
        note(str(e))
    except Exception as e:  # whatever a model's code raises: the disk can be measured all the same
        text = " ".join(str(e).split()) or type(e).__name__
        note(f"this model's layers could not be measured: {text[:200]}")
    return {}


def calibrate_mirrors(
    mirrors: Sequence[Replica],
    cpu_streams: int,
    *,
    force: bool = False,
    progress: Progress = lambda *_: None,
) -> list[Calibration]:
    """The disks of mirrors: those that are not known are measured, on the mirrors' own files, and kept.

    Raises:
        CalibrationError: what was measured cannot be kept.
        ReadError: a file cannot be read.
    """
    all_found = []
    for n, mirror in enumerate(mirrors):
        progress("disks of mirrors", n, len(mirrors))
        found, _ = load_calibration(mirror.folder, cpu_streams, mirror=True)
        if found is None or force:
            bench = Bench(own_files((mirror.copies or {}).values())[0])
            rate = bench.gbps(bench.settings[0], bench.unread.nbytes, STEADY_S)
            found = Calibration(read_gbps=max(rate, LEAST_GBPS), measured=True)
            store_calibration(mirror.folder, cpu_streams, found, mirror=True)
        all_found.append(found)
    return all_found


@contextlib.contextmanager
def _ranges(prepared: Prepared | None, folder: Path | None, progress: Progress, note: Note) -> Iterator[UnreadRanges]:
    """Ranges to read: the model's files, or a scratch file where they are small."""
    files = tuple(prepared.profile.lazy.checkpoint.files) if prepared is not None else ()
    own, times = own_files(files)
    if own.nbytes >= ENOUGH_BYTES and not disk_calls.system().cache_first:
        yield own
        return
    progress("writing a scratch file", 0, 1)
    where = files[0] if files else folder
    with contextlib.ExitStack() as stack:
        try:
            disk = disk_of(where) if where is not None else None
            path = stack.enter_context(scratch_file(cache_dir(), disk))
            unread = UnreadRanges([Extent(path, 0, path.stat().st_size, 0, in_place=True)])
        except CalibrationError as e:
            if not files:
                raise
            unread = own
            often = f", read {times} times, which may be faster than reading once" if times > 1 else ""
            note(f"the disk was measured on the model's own {format_size(unread.nbytes // times)}{often}: {e}")
        yield unread
