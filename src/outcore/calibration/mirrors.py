"""What the disks of mirrors read, each measured alone: together they give about the sum."""

from __future__ import annotations

import contextlib
import mmap
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from ..disk.cold_ranges import forget_before
from ..disk.layout import Extent
from ..disk.reader import FileReader, Read
from ..disk.replica import Replica
from ..plan.machine_profile import Calibration
from .calibration_file import load_calibration, store_calibration

STEADY_S = 3.0
"""Seconds of reading by which a disk is judged: a limit on its rate lets a short measurement pass more."""

PIECE, SLOTS = 64 << 20, 3
"""Bytes that are read into a buffer at once, and buffers."""


def calibrate_mirrors(
    mirrors: Sequence[Replica],
    cpu_streams: int,
    *,
    force: bool = False,
    progress: Callable[[str, int, int], None] = lambda *_: None,
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
            found = Calibration(read_gbps=read_rate((mirror.copies or {}).values()), measured=True)
            store_calibration(mirror.folder, cpu_streams, found, mirror=True)
        all_found.append(found)
    return all_found


def read_rate(files: Iterable[Path], clock: Callable[[], float] = time.perf_counter) -> float:
    """GB/s at which files are read from the disk, for ``STEADY_S`` or as long as there are any."""
    whole = [
        Extent(f, at, min(PIECE, f.stat().st_size - at), 0, in_place=True)
        for f in files
        for at in range(0, f.stat().st_size, PIECE)
    ]
    buffers = [memoryview(mmap.mmap(-1, PIECE)) for _ in range(SLOTS)]
    with contextlib.closing(FileReader(sorted({e.file for e in whole}))) as reader:
        forget_before(reader.direct, whole)
        began = clock()
        under_way: list[Read] = []
        for n, extent in enumerate(whole):
            if n >= SLOTS:
                under_way.pop(0).wait()
            if clock() - began > STEADY_S:
                break
            under_way.append(reader.submit("calibrate", [extent], buffers[n % SLOTS]))
        for read in under_way:
            read.wait()
        return max(reader.metrics.read_gbps, 1e-6)
