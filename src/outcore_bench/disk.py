"""What the disk gives a reader that does nothing else: the ceiling that streaming is measured against."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from outcore.disk.layout import Extent
from outcore.disk.reader import FileReader, Read
from outcore.disk.ring import Slot
from outcore.machine.device import device_kind
from outcore.sizes import BLOCK, round_up

from .page_cache import drop_page_cache

THREADS = (4, 8)
PIECE = 128 << 20
"""Bytes read into a slot at once: about one layer of a 4 GB model."""
LEAST_S = 0.2
"""Seconds that one repeat lasts at least, over as many passes as it takes: a small file is read in a millisecond."""


@dataclass(frozen=True)
class DiskRate:
    """GB/s by number of threads: median of the repeats, and every repeat.

    Attributes:
        best_gbps: of the better number of threads.
        direct: read around the page cache.
    """

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
    """Parallel reads of these files into two slots, around the page cache where the file system allows it; else the
    files are dropped from it before each pass.

    Args:
        most: bytes of one pass; None: all. Fewer than all are taken evenly from all files.
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
    # The kinds take turns, so that drift meets all of them.
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
    """Seconds to read all pieces, two at a time."""
    began = time.perf_counter()
    under_way: list[Read] = []
    for i, extent in enumerate(pieces):
        if len(under_way) == len(slots):
            under_way.pop(0).wait()
        under_way.append(reader.submit("disk", [extent], slots[i % len(slots)].payload))
    for read in under_way:
        read.wait()
    return time.perf_counter() - began
