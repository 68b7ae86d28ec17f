"""Ranges of files that nothing has read yet, to measure a disk with.

Nothing is read twice in one run: a cache (the kernel's, the disk's own, a hypervisor's) may hold what was read before.
Where a model's files are too small for that, a scratch file is written beside them and removed again.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil  # type: ignore[import-untyped]

from .errors import CalibrationError
from .layout import BLOCK, GPU_ALIGN, Extent, round_up
from .sizes import format_size

ENOUGH_BYTES, SCRATCH_BYTES, LEAST_SCRATCH = 1_500_000_000, 2_000_000_000, 512_000_000
"""Bytes of a model's files from which they will do, of a scratch file where they will not, and the least of those."""

SCRATCH = ".outcore-calibrate-"

Piece = tuple[Extent, ...]
"""Extents that are read into one slot."""


class Unread:
    """Ranges of files that no measurement has read yet, given out one after the other."""

    def __init__(self, extents: Iterable[Extent]) -> None:
        self._left = deque(extents)
        self.files = sorted({e.file for e in self._left})
        self.nbytes = sum(e.nbytes for e in self._left)

    def take(self, nbytes: int, piece: int) -> list[Piece]:
        """The next ``nbytes``, or what is left of them, as pieces that fit into slots of ``piece`` bytes each."""
        pieces: list[Piece] = []
        part: list[Extent] = []
        end = 0  # of the piece so far, in its slot
        while nbytes > 0 and self._left:
            e = self._left.popleft()
            at = round_up(end, BLOCK) + e.offset % BLOCK if e.in_place else round_up(end, GPU_ALIGN)
            n = min(e.nbytes, nbytes, piece - 2 * BLOCK - at)
            if n < e.nbytes:
                # The next piece begins at a block of the file.
                n -= (e.offset + n) % BLOCK
            if n <= 0 and part:
                self._left.appendleft(e)
                pieces.append(tuple(part))
                part, end = [], 0
                continue
            n = max(n, min(e.nbytes, BLOCK - e.offset % BLOCK))
            part.append(replace(e, nbytes=n, at=at))
            end = at + n
            nbytes -= n
            self.nbytes -= n
            if n < e.nbytes:
                self._left.appendleft(replace(e, offset=e.offset + n, nbytes=e.nbytes - n))
        return [*pieces, tuple(part)] if part else pieces


def unread_extents(extents: Iterable[Extent], rng: random.Random | None = None) -> Unread:
    """The extents in the order of the files, from a random one on: another run begins elsewhere."""
    found = sorted(extents, key=lambda e: (str(e.file), e.offset))
    start = (rng or random.Random()).randrange(len(found)) if found else 0
    return Unread([*found[start:], *found[:start]])


@contextlib.contextmanager
def scratch_file(folder: Path, nbytes: int | None = None) -> Iterator[Path]:
    """A file of random bytes that is on the disk and not in the page cache; removed however the block ends.

    Args:
        nbytes: its size; None: ``SCRATCH_BYTES``. Less where the disk has less than twice that free.

    Raises:
        CalibrationError: the disk is too full, or the folder cannot be written.
    """
    path = folder / f"{SCRATCH}{os.getpid()}"
    nbytes = nbytes or SCRATCH_BYTES
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(folder)
        free = shutil.disk_usage(folder).free
        if free < 2 * min(nbytes, LEAST_SCRATCH):
            raise CalibrationError(
                f"{folder}: measuring the disk needs a scratch file of {format_size(min(nbytes, LEAST_SCRATCH))}, but "
                f"only {format_size(free)} are free: free some, or give a model of {format_size(ENOUGH_BYTES)} or more "
                "on that disk"
            )
        try:
            _write_random(path, min(nbytes, free // 2))
            forget([Extent(path, 0, path.stat().st_size, 0)])
            yield path
        finally:
            path.unlink(missing_ok=True)
    except OSError as e:
        raise CalibrationError(
            f"{folder}: no scratch file can be written to measure the disk with ({e.strerror}): make the folder "
            f"writable, or give a model of {format_size(ENOUGH_BYTES)} or more on that disk, whose own files will do"
        ) from e


def _remove_abandoned(folder: Path) -> None:
    """Remove scratch files of processes that were killed."""
    for path in folder.glob(f"{SCRATCH}*"):
        number = path.name.removeprefix(SCRATCH)
        if number.isdecimal() and not psutil.pid_exists(int(number)):
            path.unlink(missing_ok=True)


def _write_random(path: Path, nbytes: int) -> None:
    # No two blocks are alike, for a disk that stores equal ones once; yet only the first is drawn, which takes longer.
    block = np.frombuffer(os.urandom(16 << 20), dtype=np.uint64).copy()
    with path.open("xb", buffering=0) as file:
        left = nbytes
        while left:
            block += np.uint64(0x9E3779B97F4A7C15)
            left -= file.write(block.data.cast("B")[: min(left, block.nbytes)])
        os.fsync(file.fileno())


def forget(extents: Iterable[Extent]) -> None:
    """Ask the kernel to drop these ranges from the page cache. Advice only; macOS knows none."""
    if not hasattr(os, "posix_fadvise"):
        return
    for e in extents:
        fd = os.open(e.file, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, e.offset, e.nbytes, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
