"""Ranges of files that nothing has read yet, to measure a disk with.

Nothing is read twice in one run: a cache (the kernel's, the disk's own, a hypervisor's) may hold what was read before.
Where a model's files are too small for that, a scratch file without a name is written, in the cache folder and never in
the model's, which may be somebody else's, read-only, or copied elsewhere as it changes. Where that is another disk, the
model's files are read again and again, and the calibration says that it is unsure.
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

ENOUGH_BYTES, SCRATCH_BYTES, LEAST_SCRATCH = 1_500_000_000, 2_000_000_000, 512_000_000
"""Bytes of a model's files from which they will do, of a scratch file where they will not, and the least of those."""

WRITE_S, SYNC_BYTES = 12.0, 128 << 20
"""Seconds that a scratch file is written for at most; and bytes after which the disk is waited for."""

MOST_TIMES = 100
"""Times that files are read which are too small."""

STEP = 64 << 20
"""Bytes of a range of a file at most."""

SCRATCH = ".outcore-calibrate-"

Piece = tuple[Extent, ...]
"""What is read into one slot."""


class UnreadRanges:
    """Ranges of files that no measurement has read yet, given out one after the other."""

    def __init__(self, extents: Iterable[Extent]) -> None:
        self._left = deque(extents)
        self.files = sorted({e.file for e in self._left})
        self.nbytes = sum(e.nbytes for e in self._left)

    def take(self, nbytes: int, piece: int) -> list[Piece]:
        """The next ``nbytes``, or what is left of them, as pieces that fit into slots of ``piece`` bytes each."""
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
    """All of these files from a random place on, since another run should begin elsewhere; as often as it takes to make
    ``LEAST_SCRATCH`` of them, and how often that is."""
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
    """A file of random bytes that is on the disk and not in the page cache. It has no name from before the first byte
    on, so nothing stays of it however this process ends; the path leads to it while the block runs.

    Args:
        folder: made if it is not there.
        disk: of which the folder must be (``st_dev``); None: of any.
        nbytes: its size; None: ``SCRATCH_BYTES``. Less where the disk has less than twice that free.

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
            path = Path(f"/dev/fd/{number}")  # which Linux and macOS both have
            _write_random(number, min(nbytes, free // 2))
            forget([Extent(path, 0, path.stat().st_size, 0)])
        except OSError as e:
            raise CalibrationError(
                f"{folder}: no scratch file can be written to measure the disk with ({e.strerror}): make the folder "
                f"writable, or give a model of {format_size(ENOUGH_BYTES)} or more on that disk"
            ) from e
        yield path


def disk_of(path: Path) -> int:
    """The number of the file system (``st_dev``) that something is on, or would be."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path.stat().st_dev


def _write_random(number: int, nbytes: int, clock: Callable[[], float] = time.perf_counter) -> None:
    """Write so many bytes, or what is written in ``WRITE_S``."""
    # No two blocks are alike, for a disk that stores equal ones once; yet only the first is drawn, which takes longer.
    block = np.frombuffer(os.urandom(16 << 20), dtype=np.uint64).copy()
    calls = disk_calls.system()
    calls.around_cache(number)
    ends, written = clock() + WRITE_S, 0
    while written < nbytes and (not written or clock() < ends):
        block += np.uint64(0x9E3779B97F4A7C15)
        written += calls.write(number, block.data.cast("B")[: min(nbytes - written, block.nbytes)])
        if written % SYNC_BYTES < block.nbytes:
            calls.fsync(number)  # what has not reached the disk yet would be waited for at the end
    calls.fsync(number)


def forget(extents: Iterable[Extent]) -> None:
    """Ask the kernel to drop these ranges from the page cache. Advice only."""
    calls = disk_calls.system()
    for e in extents:
        fd = calls.open(e.file)
        try:
            calls.forget(fd, e.offset, e.nbytes)
        finally:
            calls.close(fd)
