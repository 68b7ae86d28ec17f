"""Ranges of files that nothing has read yet, to measure a disk without its caches.

Where a model's files are too small, an unnamed scratch file is written in the cache folder. If that is on another disk,
the model's files are read repeatedly, and a note says that the result is uncertain.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from outcore.disk import disk_calls
from outcore.disk.layout import Extent
from outcore.errors import CalibrationError
from outcore.sizes import BLOCK, format_size

# Bytes of a model's files that suffice, of a scratch file, and of the smallest scratch file.
ENOUGH_BYTES, SCRATCH_BYTES, LEAST_SCRATCH = 1_500_000_000, 2_000_000_000, 512_000_000

# Most seconds of writing a scratch file, and bytes between two waits for the disk.
WRITE_S, SYNC_BYTES = 12.0, 128 << 20

# How often files that are too small are read at most.
MOST_TIMES = 100

# Most bytes of one range.
STEP = 64 << 20

SCRATCH = ".outcore-calibrate-"

# Extents that are read into one slot.
Piece = tuple[Extent, ...]


class UnreadRanges:
    """Hands out ranges of files, each once."""

    def __init__(self, extents: Iterable[Extent]) -> None:
        self._left = deque(extents)
        self.files = sorted({e.file for e in self._left})
        self.nbytes = sum(e.nbytes for e in self._left)

    def take(self, nbytes: int, piece: int) -> list[Piece]:
        """Returns the next ``nbytes``, or what is left, as pieces that fit slots of ``piece`` bytes."""
        pieces: list[Piece] = []
        while nbytes > 0 and self._left:
            e = self._left.popleft()
            at = e.offset % BLOCK
            n = min(e.nbytes, nbytes, piece - 2 * BLOCK - at)
            if n < e.nbytes:
                # The next piece begins at a block of the file.
                n = max(n - (e.offset + n) % BLOCK, min(e.nbytes, BLOCK - at))
                self._left.appendleft(replace(e, offset=e.offset + n, nbytes=e.nbytes - n))
            pieces.append((replace(e, nbytes=n, at=at),))
            nbytes, self.nbytes = nbytes - n, self.nbytes - n
        return pieces


def own_files(files: Iterable[Path]) -> tuple[UnreadRanges, int]:
    """Returns all ranges from a random start, repeated until they make ``LEAST_SCRATCH`` bytes, and how often they
    repeat."""
    sizes = {f: f.stat().st_size for f in sorted(set(files))}
    whole = [
        Extent(f, at, min(STEP, size - at), 0, in_place=True)
        for f, size in sizes.items()
        for at in range(0, size, STEP)
    ]
    start = random.randrange(len(whole)) if whole else 0
    times = max(1, min(MOST_TIMES, -(-LEAST_SCRATCH // max(1, sum(sizes.values())))))
    return UnreadRanges([*whole[start:], *whole[:start]] * times), times


@contextlib.contextmanager
def scratch_file(folder: Path, disk: int | None = None, nbytes: int | None = None) -> Iterator[Path]:
    """Yields the path of an unnamed file of random bytes, on the disk and not in the page cache.

    Args:
        folder: created if missing.
        disk: file system that the folder must be on (``st_dev``); None: any.
        nbytes: size; None: ``SCRATCH_BYTES``. Smaller where the disk has less than twice that free.

    Raises:
        CalibrationError: the folder is on another disk or cannot be written, or the disk is too full.
    """
    nbytes = nbytes or SCRATCH_BYTES
    least = min(nbytes, LEAST_SCRATCH)
    with contextlib.ExitStack() as stack:
        try:
            if disk is not None and disk_of(folder) != disk:
                raise CalibrationError(f"{folder}: a scratch file there would not be on the disk that is measured")
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            free = shutil.disk_usage(folder).free
            if free < 2 * least:
                raise CalibrationError(
                    f"{folder}: measuring the disk needs a scratch file of {format_size(least)}, but only "
                    f"{format_size(free)} are free: free some, or give a model of {format_size(ENOUGH_BYTES)} or more "
                    "on that disk"
                )
            number = stack.enter_context(tempfile.TemporaryFile(dir=folder, prefix=SCRATCH, buffering=0)).fileno()
            path = Path(f"/dev/fd/{number}")  # exists on Linux and macOS
            _write_random(number, min(nbytes, free // 2))
            forget([Extent(path, 0, path.stat().st_size, 0)])
        except OSError as e:
            raise CalibrationError(
                f"{folder}: no scratch file can be written to measure the disk with ({e.strerror}): make the folder "
                f"writable, or give a model of {format_size(ENOUGH_BYTES)} or more on that disk"
            ) from e
        yield path


def disk_of(path: Path) -> int:
    """Returns the file system (``st_dev``) of a path, or of its nearest existing parent."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path.stat().st_dev


def _write_random(number: int, nbytes: int, clock: Callable[[], float] = time.perf_counter) -> None:
    """Writes ``nbytes`` random bytes, or as many as fit into ``WRITE_S`` seconds."""
    # Blocks differ, in case the disk stores equal ones once; only the first is drawn, since drawing is slow.
    block = np.frombuffer(os.urandom(16 << 20), dtype=np.uint64).copy()
    calls = disk_calls.system()
    calls.around_cache(number)
    ends, written = clock() + WRITE_S, 0
    while written < nbytes and (not written or clock() < ends):
        block += np.uint64(0x9E3779B97F4A7C15)
        written += calls.write(number, block.data.cast("B")[: min(nbytes - written, block.nbytes)])
        if written % SYNC_BYTES < block.nbytes:
            calls.fsync(number)  # otherwise the last fsync would wait for everything
    calls.fsync(number)


def forget(extents: Iterable[Extent]) -> None:
    """Advises the kernel to drop these ranges from the page cache."""
    calls = disk_calls.system()
    for e in extents:
        fd = calls.open(e.file)
        try:
            calls.forget(fd, e.offset, e.nbytes)
        finally:
            calls.close(fd)
