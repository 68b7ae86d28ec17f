"""What this machine does with the reader's own reads, and whether the device sees what is written into a slot."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

from ..disk.layout import Extent, Source, place_unit
from ..machine.device import device_kind
from ..sizes import BLOCK, round_up
from .cold_ranges import forget
from .metrics import Metrics
from .reader import FileReader
from .ring import Slot

ODD_OFFSETS = (0, 1, 1288, BLOCK - 1, BLOCK, 7936, 16385)
"""Bytes from the start of the file; the third and the sixth were read wrongly once."""

ALIGNMENTS = (1, 8, 256)
"""Bytes that parameters are aligned to in a slot: a CPU's, the files' own, and a GPU's."""

TIMED_BYTES = 64 << 20
"""Bytes of the range that is read twice."""

REWRITES = 100


@dataclass(frozen=True)
class DiskProbe:
    """What was found of one file.

    Attributes:
        direct: the reader reads it around the page cache.
        nbytes: of the range that was read twice.
        first_s, second_s: seconds of each time. A second that took a small part of the first came from a cache.
        wrong: offset, alignment and way (``direct`` or ``cached``) of every read whose bytes were not the file's.
    """

    direct: bool
    nbytes: int
    first_s: float
    second_s: float
    wrong: tuple[tuple[int, int, str], ...]


def probe_disk(path: Path, io: str = "auto", clock: Callable[[], float] = time.perf_counter) -> DiskProbe:
    """Open a file as a model's are, read a range of its middle twice, and other bytes at odd offsets.

    Raises:
        ReadError: it cannot be opened, or the disk failed.
        UsageError: ``io="direct"`` on a file system without direct reads.
    """
    size = path.stat().st_size
    nbytes = min(TIMED_BYTES, size)
    whole = Extent(path, (size - nbytes) // 2 // BLOCK * BLOCK, nbytes, 0, in_place=True)
    forget([whole])
    slot = Slot(round_up(max(nbytes, 1), BLOCK), device_kind())
    seconds = []
    with contextlib.closing(FileReader([path], io=io, metrics=Metrics(clock=clock))) as reader:
        for _ in range(2):
            began = clock()
            reader.submit("probe", [whole], slot.payload).wait()
            seconds.append(clock() - began)
        wrong, direct = _wrong(path, size, reader), reader.direct
    if direct:
        wrong += wrong_reads(path, "cached")
    return DiskProbe(direct, nbytes, seconds[0], seconds[1], wrong)


def wrong_reads(path: Path, io: str = "auto") -> tuple[tuple[int, int, str], ...]:
    """``DiskProbe.wrong`` of a file, read in one way: milliseconds. Raises as ``probe_disk``."""
    with contextlib.closing(FileReader([path], io=io, threads=1)) as reader:
        return _wrong(path, path.stat().st_size, reader)


def _wrong(path: Path, size: int, reader: FileReader) -> tuple[tuple[int, int, str], ...]:
    found = []
    for offset in ODD_OFFSETS:
        nbytes = min(3 * BLOCK + 17, size - offset)
        if nbytes <= 0:
            continue
        with path.open("rb") as file:
            file.seek(offset)
            expected = file.read(nbytes)
        forget([Extent(path, offset, nbytes, 0)])
        for align in ALIGNMENTS:
            source = Source("x", "U8", (nbytes,), path, offset, nbytes)
            unit = place_unit("probe", [source], direct=reader.direct, align=align)
            slot = Slot(unit.slot_bytes)
            reader.submit("probe", unit.extents, slot.payload).wait()
            at = unit.fields[0].at
            if slot.payload[at : at + nbytes] != expected:
                found.append((offset, align, "direct" if reader.direct else "cached"))
    return tuple(found)


def unseen_rewrites(times: int = REWRITES, nbytes: int = 16 * BLOCK) -> int:
    """Write ``times`` random contents into one slot and have the device add up the first view that was made of it.

    Returns:
        How often its sum was not NumPy's: 0 where slots work, on which everything that is streamed relies.
    """
    slot = Slot(nbytes, device_kind())
    view = slot.array[slot.base : slot.base + nbytes].view(mx.uint32)
    mx.eval(view)
    rng = np.random.default_rng(0)
    unseen = 0
    for _ in range(times):
        content = rng.integers(0, 2**32, nbytes // 4, dtype=np.uint32)
        slot.payload[:nbytes] = content.tobytes()
        # Sums of 32-bit numbers wrap around in both.
        unseen += mx.sum(view).item() != int(content.sum(dtype=np.uint32))
    return unseen
