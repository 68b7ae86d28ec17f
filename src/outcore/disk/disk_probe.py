"""What a file's disk does with the reader's own reads: for a look at a machine on which something seems wrong."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from ..machine.device import device_kind
from . import disk_calls
from .cold_ranges import forget
from .layout import BLOCK, Extent, Source, place_unit, round_up
from .metrics import Metrics
from .reader import FileReader
from .ring import Slot

ODD_OFFSETS = (0, 1, 1288, BLOCK - 1, BLOCK, 7936, 16385)
"""Bytes from the start of the file; the third and the sixth were read wrongly once."""

ALIGNMENTS = (1, 8, 256)
"""Bytes that parameters are aligned to in a slot: a CPU's, the files' own, and a GPU's."""

TIMED_BYTES = 64 << 20
"""Bytes of the range that is read twice."""


@dataclass(frozen=True)
class DiskProbe:
    """What was found of one file.

    Attributes:
        direct: the reader reads it around the page cache.
        bounces: the system refused to read straight into MLX's memory, so a buffer stands between.
        forgets: the system took the advice to drop a range from its page cache.
        nbytes: of the range that was read twice.
        first_s, second_s: seconds of each time. A second that took a small part of the first came from a cache.
        copied_s: seconds of the same through buffers, which are made meanwhile, where the first went straight into
            MLX's memory. Much less than the first where that is slow to read into.
        off_page_s: seconds of nearly the same, from one block on: straight into memory at a block that begins no page
            (of 16 KiB on Apple silicon). Much more than the first where the driver asks for memory in whole pages
            (``mnt_alignmentmask``, xnu's vfs_init_io_attributes in vfs_subr.c).
        wrong: offset, alignment and way (``direct`` or ``cached``) of every read whose bytes were not the file's.
    """

    direct: bool
    bounces: bool
    forgets: bool
    nbytes: int
    first_s: float
    second_s: float
    copied_s: float
    off_page_s: float
    wrong: tuple[tuple[int, int, str], ...]


def probe_disk(path: Path, io: str = "auto", clock: Callable[[], float] = time.perf_counter) -> DiskProbe:
    """Open a file as a model's are, read a range of its middle twice, and other bytes at odd offsets.

    Raises:
        ReadError: it cannot be opened, or the disk failed.
        UsageError: ``io="direct"`` on a file system without direct reads.
    """
    size = path.stat().st_size
    nbytes = min(TIMED_BYTES, size)
    middle = (size - nbytes) // 2 // BLOCK * BLOCK
    whole = Extent(path, middle, nbytes, 0, in_place=True)
    off_page = Extent(path, middle + BLOCK, max(0, nbytes - BLOCK), BLOCK, in_place=True)
    forgets = _forgets(whole)
    slot = Slot(round_up(max(nbytes, 1), BLOCK), device_kind())
    wrong: list[tuple[int, int, str]] = []
    seconds: list[float] = []
    with contextlib.closing(FileReader([path], io=io, metrics=Metrics(clock=clock))) as reader:
        copied = replace(whole, in_place=False)
        for extent, again in ((whole, False), (whole, True), (copied, False), (off_page, False)):
            if not again:
                forget([extent])
            began = clock()
            reader.submit("probe", [extent], slot.payload).wait()
            seconds.append(clock() - began)
        wrong += _wrong(path, size, reader)
        direct = reader.direct
    if direct:
        with contextlib.closing(FileReader([path], io="cached")) as cached:
            wrong += _wrong(path, size, cached)
    first_s, second_s, copied_s, off_page_s = seconds
    return DiskProbe(direct, reader.bounces, forgets, nbytes, first_s, second_s, copied_s, off_page_s, tuple(wrong))


def wrong_reads(path: Path, io: str = "auto") -> tuple[tuple[int, int, str], ...]:
    """``DiskProbe.wrong`` of a file, read in one way: milliseconds. Raises as ``probe_disk``."""
    with contextlib.closing(FileReader([path], io=io, threads=1)) as reader:
        return tuple(_wrong(path, path.stat().st_size, reader))


def _forgets(extent: Extent) -> bool:
    calls = disk_calls.system()
    fd = calls.open(extent.file)
    try:
        return calls.forget(fd, extent.offset, extent.nbytes)
    finally:
        calls.close(fd)


def _wrong(path: Path, size: int, reader: FileReader) -> list[tuple[int, int, str]]:
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
            unit = place_unit(
                "probe", [Source("x", "U8", (nbytes,), path, offset, nbytes)], direct=reader.direct, align=align
            )
            slot = Slot(unit.slot_bytes)
            reader.submit("probe", unit.extents, slot.payload).wait()
            at = unit.fields[0].at
            if slot.payload[at : at + nbytes] != expected:
                found.append((offset, align, "direct" if reader.direct else "cached"))
    return found
