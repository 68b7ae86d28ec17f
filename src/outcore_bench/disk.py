"""Measures the disk's read rate, the ceiling for streaming, and empties the page cache."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from outcore.checkpoint.checkpoint import open_checkpoint
from outcore.checkpoint.manifest import MANIFEST, is_packed, read_manifest
from outcore.disk import disk_calls
from outcore.disk.layout import Extent
from outcore.disk.reader import FileReader, Read
from outcore.disk.ring import Slot
from outcore.machine.device import device_kind
from outcore.sizes import BLOCK, round_up

THREADS = (4, 8)
PIECE = 128 << 20
"""Bytes per read, about one layer of a 4 GB model."""
LEAST_S = 0.2
"""Shortest repeat in seconds; small files are read several times."""


@dataclass(frozen=True)
class DiskRate:
    """The median and all repeats by number of threads, in GB/s, and whether reads bypassed the page cache."""

    gbps: dict[str, float]
    best_gbps: float
    repeats_gbps: dict[str, list[float]]
    direct: bool


def disk_rate(
    files: Sequence[Path],
    threads: Sequence[int] = THREADS,
    repeats: int = 3,
    piece: int = PIECE,
    most: int | None = None,
) -> DiskRate:
    """Times parallel reads into two slots that bypass the page cache or, if they cannot, empty it first.

    Args:
        most: read only so many bytes, taken evenly from all files.
    """
    pieces = [
        Extent(file, at, min(piece, file.stat().st_size - at), 0, in_place=True)
        for file in files
        for at in range(0, file.stat().st_size, piece)
    ]
    nbytes = sum(e.nbytes for e in pieces)
    if most is not None and nbytes > most:
        keep = max(1, len(pieces) * most // nbytes)
        pieces = [pieces[i * len(pieces) // keep] for i in range(keep)]
    device = device_kind()
    slots = [Slot(round_up(max(e.nbytes for e in pieces), BLOCK), device) for _ in range(2)]
    rates: dict[str, list[float]] = {}
    direct = True
    # The numbers of threads take turns, so that drift affects all of them alike.
    for _ in range(repeats):
        for n in threads:
            reader = FileReader(files, threads=n)
            direct = reader.direct
            seconds, passes = 0.0, 0
            while seconds < LEAST_S:
                drop_page_cache(files)
                seconds += _pass(reader, pieces, slots)
                passes += 1
            reader.close()
            rates.setdefault(str(n), []).append(passes * sum(e.nbytes for e in pieces) / seconds / 1e9)
    medians = {n: statistics.median(r) for n, r in rates.items()}
    return DiskRate(medians, max(medians.values()), rates, direct)


def _pass(reader: FileReader, pieces: Sequence[Extent], slots: Sequence[Slot]) -> float:
    began = time.perf_counter()
    in_flight: list[Read] = []
    for i, extent in enumerate(pieces):
        if len(in_flight) == len(slots):
            in_flight.pop(0).wait()
        in_flight.append(reader.submit("disk", [extent], slots[i % len(slots)].payload))
    for read in in_flight:
        read.wait()
    return time.perf_counter() - began


def drop_page_cache(files: Iterable[Path]) -> None:
    """Drops files from the page cache, except pages that are mapped."""
    calls = disk_calls.system()
    for path in files:
        fd = calls.open(path)
        try:
            calls.fsync(fd)
            calls.forget(fd, 0, path.stat().st_size)
        finally:
            calls.close(fd)


def weight_files(folder: Path) -> tuple[Path, ...]:
    """Returns the files of a model's weights, also of a packed copy."""
    if is_packed(folder):
        return tuple(folder / name for name in sorted(read_manifest(folder / MANIFEST).files))
    return open_checkpoint(folder).files
