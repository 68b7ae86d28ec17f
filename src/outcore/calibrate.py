"""``outcore calibrate``: what this machine does, measured in under a minute and kept for each machine and disk."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import mlx.core as mx

from .calibrate_compute import COMPUTE_S, model_load, product_gbps, product_load, sync_seconds, times_of
from .calibrate_disk import MOST_BESIDE, ROUNDS, Bench, Reading, Setting, best_setting, disk_rate_now
from .calibrate_rig import Rig, rig
from .calibration import Calibration
from .calibration_file import load_calibration, merge, store_calibration
from .errors import OutcoreError
from .layout import Extent
from .store import cache_dir
from .unread import ENOUGH_BYTES, Unread, scratch_file, unread_extents

if TYPE_CHECKING:  # the loader asks for calibrations, so it cannot be imported from here
    from .loader import Preparation

__all__ = [
    "calibrate",
    "calibrated",
    "disk_rate_now",
    "kinds_of",
    "load_calibration",
    "measure_kinds",
    "merge",
    "store_calibration",
]

Progress = Callable[[str, int, int], None]
"""Called with what is being done, steps done, and steps in all."""

Note = Callable[[str], None]
"""Called with a line for the user: what could not be measured, and why."""

ALONE_S = 0.3
"""Seconds that computing is measured without reads beside it."""


def calibrate(
    prepared: Preparation | None = None,
    *,
    folder: Path | None = None,
    progress: Progress = lambda *_: None,
    note: Note = lambda _: None,
) -> Calibration:
    """Measure the disk that the model is on, the model's layers, and each beside the other; under a minute.

    Args:
        prepared: a model, opened and not loaded, which is left as it was. None: the disk alone.
        folder: where a scratch file is written if the model's own files are too small or there is no model; None:
            beside them, or in the cache folder.

    Raises:
        CalibrationError: a scratch file is needed and cannot be written.
        ReadError: the model's files cannot be read.
    """
    with contextlib.ExitStack() as stack:
        made: Rig | None = None
        kinds: dict[str, dict[int, float]] = {}
        sync_s = sync_seconds()
        if prepared is not None:
            made, kinds = _layers(stack, prepared, sync_s, progress, note)
        unread = stack.enter_context(_ranges(prepared, folder, progress))
        bench = Bench(unread)
        best = best_setting(bench, progress)
        gbps, reading, computing = _beside(bench, best.setting, best.gbps, made, progress)
        weight_gbps = (prepared and _weight_gbps(prepared, kinds)) or product_gbps()
    mx.clear_cache()
    return Calibration(
        read_gbps=gbps,
        read_latency_s=best.latency_s,
        sync_s=sync_s,
        read_slowdown=reading,
        compute_slowdown=computing,
        weight_gbps=weight_gbps,
        # Another file of the disk may lie where direct reads are refused: auto reads cached there.
        io="auto" if best.setting.direct else "cached",
        threads=best.setting.threads,
        chunk=best.setting.chunk,
        kinds=kinds,
        disk_points=best.points,
        measured=True,
    )


def kinds_of(prepared: Preparation) -> set[str]:
    """The kinds of a model's layers, and of what lies outside of them."""
    size = prepared.survey.size
    return {layer.kind for layer in size.layers} | ({size.rest_kind} if size.layers else set())


def calibrated(
    prepared: Preparation | None,
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
    measured: tuple[str, ...] = ()
    if known is None or force:
        measured = ("disk", "layers") if prepared is not None else ("disk",)
        known = calibrate(prepared, folder=folder, progress=progress, note=note)
    elif prepared is not None and kinds_of(prepared) - known.kinds.keys():
        measured = ("layers",)
        known = merge(known, measure_kinds(prepared, progress=progress, note=note))
    if measured:
        store_calibration(folder, cpu_streams, known)
    return known, measured


def measure_kinds(
    prepared: Preparation,
    *,
    budget_s: float = COMPUTE_S,
    progress: Progress = lambda *_: None,
    note: Note = lambda _: None,
) -> dict[str, dict[int, float]]:
    """Seconds of one pass by kind of layer and number of tokens; empty, with a note, where the model cannot be run.

    The model is left as it was.
    """
    with contextlib.ExitStack() as stack:
        return _layers(stack, prepared, sync_seconds(), progress, note, budget_s)[1]


def _weight_gbps(prepared: Preparation, kinds: Mapping[str, Mapping[int, float]]) -> float | None:
    """GB/s of the layers' weights for one token; None where none were measured."""
    known = [(z.resident, kinds[z.kind][1]) for z in prepared.survey.size.layers if 1 in kinds.get(z.kind, {})]
    return sum(nbytes for nbytes, _ in known) / sum(s for _, s in known) / 1e9 if known else None


def _layers(
    stack: contextlib.ExitStack,
    prepared: Preparation,
    sync_s: float,
    progress: Progress,
    note: Note,
    budget_s: float = COMPUTE_S,
) -> tuple[Rig | None, dict[str, dict[int, float]]]:
    """A model that runs on random weights until the stack is closed, and its times."""
    own = contextlib.ExitStack()
    try:
        made = own.enter_context(rig(prepared.survey, prepared.cpu_streams))
        kinds = times_of(made, sync_s, budget_s=budget_s, progress=progress)
    except OutcoreError as e:
        own.close()
        note(str(e))
        return None, {}
    except Exception as e:  # whatever a model's code raises: the disk can be measured all the same
        own.close()
        text = " ".join(str(e).split()) or type(e).__name__
        note(f"this model's layers could not be measured: {text[:200]}")
        return None, {}
    except BaseException:
        own.close()
        raise
    stack.push(own)
    return made, kinds


@contextlib.contextmanager
def _ranges(prepared: Preparation | None, folder: Path | None, progress: Progress) -> Iterator[Unread]:
    """Ranges to read: the model's layers as they would be streamed, or a scratch file."""
    extents: list[Extent] = []
    if prepared is not None:
        units = [unit for unit in prepared.survey.units if unit is not None]
        extents = [e for unit in units for e in unit.extents]
        # What sanitize changed lies on disk only once it has been packed.
        there = {e.file: e.file.exists() for e in extents}
        extents = [e for e in extents if there[e.file]]
        folder = folder or prepared.survey.lazy.checkpoint.folder
    if sum(e.nbytes for e in extents) >= ENOUGH_BYTES:
        yield unread_extents(extents)
        return
    progress("writing a scratch file", 0, 1)
    with scratch_file(folder or cache_dir()) as path:
        yield Unread([Extent(path, 0, path.stat().st_size, 0, in_place=True)])


def _beside(
    bench: Bench, setting: Setting, gbps: float, made: Rig | None, progress: Progress
) -> tuple[float, float, float]:
    """GB/s of reads alone, and how much longer reads and computing take beside each other; in turns, medians."""
    load = model_load(made) if made is not None else product_load()
    nbytes = min(MOST_BESIDE, bench.unread.nbytes // (2 * ROUNDS))
    step = max(s for _, s in load(_after(ALONE_S)))
    if made is not None and step * 2 * gbps * 1e9 > nbytes:
        # A layer takes longer than there is to read beside it.
        load = product_load()
    alone_gbps, reads, computes = [], [], []
    reading = Reading(bench, setting, nbytes)
    try:
        for turn in range(ROUNDS):
            progress("reading beside computing", turn, ROUNDS)
            expected = _medians(load(_after(ALONE_S)))
            reading.begin()
            alone_gbps.append(reading.gbps())
            ended = reading.begin()
            samples = load(ended)
            both_gbps = reading.gbps()
            if both_gbps > 0:
                reads.append(alone_gbps[-1] / both_gbps)
            # The last one may have ended after the reads.
            inside = [(name, s) for name, s in samples[:-1] if name in expected]
            if inside:
                computes.append(sum(s for _, s in inside) / sum(expected[name] for name, _ in inside))
    finally:
        reading.close()
    progress("reading beside computing", ROUNDS, ROUNDS)
    measured = [rate for rate in alone_gbps if rate > 0]
    return (
        median(measured) if measured else gbps,
        max(1.0, median(reads)) if reads else 1.0,
        max(1.0, median(computes)) if computes else 1.0,
    )


def _after(seconds: float) -> Callable[[], bool]:
    """A function that says whether so many seconds have passed since it was made."""
    end = time.perf_counter() + seconds
    return lambda: time.perf_counter() > end


def _medians(samples: Sequence[tuple[str, float]]) -> dict[str, float]:
    by_name: dict[str, list[float]] = defaultdict(list)
    for name, seconds in samples:
        by_name[name].append(seconds)
    return {name: median(times) for name, times in by_name.items()}
