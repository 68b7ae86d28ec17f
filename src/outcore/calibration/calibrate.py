"""``outcore calibrate``: what this machine does, measured in under a minute and kept for each machine and disk."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Protocol

from ..checkpoint.packed_store import cache_dir
from ..disk.cold_ranges import ENOUGH_BYTES, UnreadRanges, disk_of, own_files, scratch_file, unread_extents
from ..disk.layout import Extent
from ..engine.model_profile import ModelProfile
from ..errors import CalibrationError, OutcoreError
from ..machine.allocator import clear_cache
from ..machine.hardware import cores
from ..machine.memory import last_resort
from ..machine.neighbours import Neighbours, undisturbed
from ..plan.machine_profile import Calibration, Conditions
from ..plan.plan import Plan
from ..sizes import format_size
from .calibration_file import load_calibration, merge, store_calibration
from .check import product_times
from .compute import (
    COMPUTE_S,
    LayerTimes,
    cast_gbps,
    decode_gbps,
    join_gbps,
    model_load,
    product_gbps,
    product_load,
    sync_seconds,
    times_of,
)
from .disk import DISK_S, MOST_BESIDE, ROUNDS, BackgroundReads, Bench, Best, best_setting, disk_rate_now
from .pieces import PIECES_S, part_seconds
from .random_model import Rig, rig
from .renewal import due, is_quiet, quieter, renewed, renewed_note

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

ALONE_S = 0.3
"""Seconds that computing is measured without reads beside it."""

BESIDE_S = 8.0
"""Seconds of reading beside computing after which no further turn begins."""

TURN_S = 1.5
"""Seconds of reading in such a turn at most, alone and beside computing each."""

MOST_S, LEAST_S = 50.0, 3.0
"""Seconds after which nothing more is begun, however slow the disk is, and seconds that the disk is measured for all
the same. What was begun is over within a minute."""

AGAIN_SPREAD = 1.0
"""What a rate is taken to be off by that was measured on ranges which some cache may have held."""


def calibrate(
    prepared: Prepared | None = None,
    *,
    folder: Path | None = None,
    cpu_streams: int | None = None,
    progress: Progress = lambda *_: None,
    note: Note = lambda _: None,
    neighbours: Callable[[], Neighbours] = Neighbours,
) -> Calibration:
    """Measure the disk that the model is on, the model's layers, and each beside the other; under a minute.

    The model's folder is only ever read. What others do meanwhile is watched: what they disturbed is measured again
    while there is time, or at its best moment, and how it was is kept.

    Args:
        prepared: a model, opened and not loaded, which is left as it was. None: the disk alone.
        folder: on the disk to measure where there is no model; None: the cache folder.
        cpu_streams: as the model's, where there is none; None: one per core.
        neighbours: watches what others use of the processors.

    Raises:
        CalibrationError: there is no model, and no scratch file can be written on that disk.
        ReadError: the model's files cannot be read.
    """
    streams = prepared.cpu_streams if prepared is not None else cpu_streams or cores()
    began = time.perf_counter()

    def left() -> float:
        return max(LEAST_S, MOST_S - (time.perf_counter() - began))

    with contextlib.ExitStack() as stack:
        made: Rig | None = None
        layers = LayerTimes({})
        products = product_times(streams)
        sync_s = sync_seconds()
        if prepared is not None:
            made, layers = _layers(stack, prepared, sync_s, progress, note, neighbours=neighbours())
        unread, again = _ranges(stack, prepared, folder, progress, note)
        watched = neighbours()
        bench = Bench(unread)
        best = best_setting(bench, progress, min(DISK_S, left() - BESIDE_S))
        units = bench.unit_seconds(best.setting, best.gbps)
        gbps, reading, computing = _beside(bench, best, made, progress, watched, min(BESIDE_S, left()))
        load = watched.whole()
        weight_gbps = (prepared and _weight_gbps(prepared, layers.kinds)) or product_gbps()
        joining, decoding, casting = join_gbps(streams), decode_gbps(), cast_gbps()
        products += product_times(streams)
    clear_cache()
    return Calibration(
        read_gbps=gbps,
        read_latency_s=best.latency_s,
        unit_s=units,
        sync_s=sync_s,
        read_slowdown=reading,
        compute_slowdown=computing,
        weight_gbps=weight_gbps,
        join_gbps=joining,
        decode_gbps=decoding,
        cast_gbps=casting,
        # Another file of the disk may lie where direct reads are refused: auto reads cached there.
        io="auto" if best.setting.direct else "cached",
        threads=best.setting.threads,
        chunk=best.setting.chunk,
        kinds=layers.kinds,
        parts=layers.parts,
        disk_points=best.points,
        disk_conditions=Conditions(time.time(), load, max(best.spread, AGAIN_SPREAD) if again else best.spread),
        kind_conditions=dict.fromkeys(layers.kinds, layers.conditions) if layers.conditions is not None else {},
        product_s=min(products),
        measured=True,
    )


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
    quiet: Callable[[], bool] = is_quiet,
) -> tuple[Calibration, tuple[str, ...]]:
    """The calibration of this machine, the disk that ``folder`` is on, and the model: what is not known is measured,
    and what had been measured beside others, if they are still now.

    Returns:
        The calibration, kept for the next time; and what was measured now: ``disk``, ``layers``.

    Raises:
        CalibrationError, ReadError: as in ``calibrate``.
    """
    known, spoilt = load_calibration(folder, cpu_streams)
    if spoilt is not None:
        note(f"an earlier calibration was not used, and this measured again: {spoilt}")
    measured: tuple[str, ...] = ()
    kinds = kinds_of(prepared) if prepared is not None else set()
    if known is None or force:
        measured = ("disk", "layers") if prepared is not None else ("disk",)
        known = calibrate(prepared, folder=folder, cpu_streams=cpu_streams, progress=progress, note=note)
    elif prepared is not None and kinds - known.kinds.keys():
        measured = ("layers",)
        layers = measure_kinds(prepared, progress=progress, note=note)
        known = merge(known, layers.kinds, layers.conditions, layers.parts)
    elif what := due(known, kinds, quiet, time.time()):
        measured, before, began = what, known, time.perf_counter()
        if "disk" in what:
            # Reads beside computing belong to it, so all of it.
            fresh = calibrate(prepared, folder=folder, cpu_streams=cpu_streams, progress=progress, note=note)
            measured = ("disk", "layers") if prepared is not None else ("disk",)
            known = quieter(known, fresh)
        elif prepared is not None:
            layers = measure_kinds(prepared, progress=progress, note=note)
            known = quieter(known, renewed(known, layers, cpu_streams, last_resort()))
        note(renewed_note(before, kinds, what, time.perf_counter() - began))
    if measured:
        store_calibration(folder, cpu_streams, known)
    return known, measured


def measure_kinds(
    prepared: Prepared,
    *,
    budget_s: float = COMPUTE_S,
    progress: Progress = lambda *_: None,
    note: Note = lambda _: None,
    neighbours: Neighbours | None = None,
    most_bytes: int | None = None,
) -> LayerTimes:
    """Seconds of one pass by kind of layer and number of tokens; empty, with a note, where the model cannot be run.

    The model is left as it was.
    """
    with contextlib.ExitStack() as stack:
        return _layers(stack, prepared, sync_seconds(), progress, note, budget_s, neighbours, most_bytes)[1]


def _weight_gbps(prepared: Prepared, kinds: Mapping[str, Mapping[int, float]]) -> float | None:
    """GB/s of the layers' weights for one token; None where none were measured."""
    known = [(z.resident, kinds[z.kind][1]) for z in prepared.profile.size.layers if 1 in kinds.get(z.kind, {})]
    return sum(nbytes for nbytes, _ in known) / sum(s for _, s in known) / 1e9 if known else None


def _layers(
    stack: contextlib.ExitStack,
    prepared: Prepared,
    sync_s: float,
    progress: Progress,
    note: Note,
    budget_s: float = COMPUTE_S,
    neighbours: Neighbours | None = None,
    most_bytes: int | None = None,
) -> tuple[Rig | None, LayerTimes]:
    """A model that runs on random weights until the stack is closed, and its times."""
    own = contextlib.ExitStack()
    try:
        made = own.enter_context(rig(prepared.profile, prepared.cpu_streams, most_bytes=most_bytes))
        times = times_of(made, sync_s, budget_s=budget_s, progress=progress, neighbours=neighbours)
        parts = part_seconds(made, sync_s, budget_s=min(PIECES_S, budget_s / 4), neighbours=neighbours)
        times = replace(times, parts=parts)
    except OutcoreError as e:
        own.close()
        note(str(e))
        return None, LayerTimes({})
    except Exception as e:  # whatever a model's code raises: the disk can be measured all the same
        own.close()
        text = " ".join(str(e).split()) or type(e).__name__
        note(f"this model's layers could not be measured: {text[:200]}")
        return None, LayerTimes({})
    except BaseException:
        own.close()
        raise
    stack.push(own)
    return made, times


def _ranges(
    stack: contextlib.ExitStack,
    prepared: Prepared | None,
    folder: Path | None,
    progress: Progress,
    note: Note,
) -> tuple[UnreadRanges, bool]:
    """Ranges to read: the model's layers as they would be streamed, or a scratch file until the stack is closed; and
    whether it is the same ones again and again, because no such file can be written on that disk."""
    files: tuple[Path, ...] = ()
    if prepared is not None:
        extents = [e for unit in prepared.profile.units if unit is not None for e in unit.extents]
        # What sanitize changed lies on disk only once it has been packed.
        there = {e.file: e.file.exists() for e in extents}
        extents = [e for e in extents if there[e.file]]
        if sum(e.nbytes for e in extents) >= ENOUGH_BYTES:
            return unread_extents(extents), False
        files = tuple(prepared.profile.lazy.checkpoint.files)
    progress("writing a scratch file", 0, 1)
    where = files[0] if files else folder
    try:
        disk = disk_of(where) if where is not None else None
        path = stack.enter_context(scratch_file(cache_dir(), disk))
    except CalibrationError as e:
        if not files:
            raise
        unread, times = own_files(files)
        note(f"the disk was measured on the model's own {format_size(unread.nbytes // times)}{_often(times)}: {e}")
        return unread, times > 1
    return UnreadRanges([Extent(path, 0, path.stat().st_size, 0, in_place=True)]), False


def _often(times: int) -> str:
    return f", read {times} times, which may be faster than reading once" if times > 1 else ""


def _beside(
    bench: Bench,
    best: Best,
    made: Rig | None,
    progress: Progress,
    neighbours: Neighbours,
    most_s: float = BESIDE_S,
) -> tuple[float, float, float]:
    """GB/s of reads alone, and how much longer reads and computing take beside each other: in turns, medians of those
    that others did not disturb; else of the best moments."""
    load = model_load(made) if made is not None else product_load()
    nbytes = min(MOST_BESIDE, bench.unread.nbytes // (2 * ROUNDS), int(best.gbps * 1e9 * TURN_S))
    step = max(s for _, s in load(_after(ALONE_S)))
    if made is not None and step * 2 * best.gbps * 1e9 > nbytes:
        # A layer takes longer than there is to read beside it.
        load = product_load()
    alone: list[float] = []
    both: list[float] = []
    computes: list[float] = []
    loads: list[float | None] = []
    background = BackgroundReads(bench, best.setting, nbytes, TURN_S)
    late = _after(most_s)
    neighbours.lap()
    try:
        for turn in range(ROUNDS):
            if turn and late():
                break
            progress("reading beside computing", turn, ROUNDS)
            expected = _medians(load(_after(ALONE_S)))
            background.begin()
            alone.append(background.gbps())
            ended = background.begin()
            samples = load(ended)
            both.append(background.gbps())
            # The last one may have ended after the reads.
            inside = [(name, s) for name, s in samples[:-1] if name in expected]
            slower = sum(s for _, s in inside) / sum(expected[name] for name, _ in inside) if inside else 0.0
            computes.append(slower)
            loads.append(neighbours.lap())
    finally:
        background.close()
    progress("reading beside computing", ROUNDS, ROUNDS)
    quiet = undisturbed(loads)
    turns = quiet or range(len(loads))
    rates = [alone[i] for i in turns if alone[i] > 0]
    slowdowns = [computes[i] for i in turns if computes[i] > 0]
    if quiet:
        reads = [alone[i] / both[i] for i in turns if alone[i] > 0 and both[i] > 0]
        value: Callable[[Sequence[float]], float] = median
    else:
        # Others can only have made reads slower. What computing lost to reads cannot be told from what it lost to them.
        reads = [max(rates) / max(both)] if rates and max(both) > 0 else []
        rates, slowdowns, value = [max([*rates, best.gbps])], [], min
    return (
        value(rates) if rates else best.gbps,
        max(1.0, value(reads)) if reads else 1.0,
        max(1.0, value(slowdowns)) if slowdowns else 1.0,
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
