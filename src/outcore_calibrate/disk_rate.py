"""Measures how fast the reader reads a disk, by requests in flight, direct or cached, from ranges not read before.

If a model's files are too small, an unnamed scratch file is written in the cache folder. If that folder is on another
disk, the disk is not measured.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from outcore.disk import disk_calls
from outcore.disk.layout import Extent
from outcore.disk.metrics import Metrics
from outcore.disk.reader import CHUNK, THREADS, FileReader
from outcore.disk.ring import Slot
from outcore.errors import CalibrationError
from outcore.machine.device import device_kind
from outcore.machine.memory import default_budget
from outcore.plan.machine_profile import Calibration
from outcore.sizes import BLOCK, format_size, round_up

MIB = 1 << 20

# Numbers of requests in flight to try, in addition to the default and ``DiskCalls.lanes``.
IN_FLIGHT = (1, 2, 8, 16)

# Bytes read into a slot at a time, about one layer of a model of 2 to 4 GB.
PIECE = 64 * MIB

# Most and fewest bytes of one measurement, and how many measurements the files must suffice for.
MOST, LEAST, MEASUREMENTS = 256 * MIB, MIB, 20

# A measurement reads at least twice the bytes in flight, or its end would count too much; at most LARGEST x the usual.
LARGEST = 6

# Most seconds of one measurement, and of the final one.
POINT_S, RATE_S = 0.4, 1.5

# Seconds between two checks of a pending read.
LOOK_S = 0.05

# Cached reads, which push out other programs' pages, and settings other than the default are chosen only if they are
# faster by this factor; less may be chance.
GAIN = 1.1

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class ReadSetting:
    """A way to read: requests of ``chunk`` bytes, ``threads`` at a time, direct or through the page cache."""

    chunk: int = CHUNK
    threads: int = THREADS
    direct: bool = True

    @property
    def in_flight(self) -> int:
        return self.chunk * self.threads


class Bench:
    """Measures read settings on ranges of files that were not read before."""

    def __init__(self, unread: UnreadRanges, clock: Callable[[], float] = time.perf_counter) -> None:
        self.unread, self.clock = unread, clock
        with contextlib.closing(FileReader(unread.files, threads=1)) as reader:
            self.small = ReadSetting(MIB, 1, reader.direct)
        # The default first, because on a slow disk not all are measured.
        tried = [ReadSetting(threads=n) for n in (THREADS, *IN_FLIGHT, *disk_calls.system().lanes)]
        tried = [*(tried if self.small.direct else []), ReadSetting(direct=False), self.small]
        self.nbytes = max(LEAST, min(MOST, unread.nbytes // MEASUREMENTS))
        affordable = [s for s in tried if 2 * s.in_flight <= LARGEST * self.nbytes]
        self.settings = list(dict.fromkeys(affordable or [self.small]))
        self.piece = max(4 * BLOCK, min(PIECE, self.nbytes // 2, default_budget() // 16))
        self.slots = [Slot(round_up(self.piece, BLOCK), device_kind()) for _ in range(4)]

    def gbps(self, setting: ReadSetting, nbytes: int, most_s: float) -> float:
        """Returns GB/s of ``nbytes`` unread bytes, or of as many as are read in ``most_s`` seconds; 0 if none are
        left."""
        pieces = self.unread.take(max(nbytes, 2 * setting.in_flight), self.piece)
        extents = [e for piece in pieces for e in piece]
        forget(extents)
        with contextlib.closing(self._reader(setting)) as reader:
            began = self.clock()
            # Threads begin reads in order, so a slot's earlier read has ended before it is overwritten.
            reads = [
                reader.submit("calibration", piece, self.slots[i % len(self.slots)].payload)
                for i, piece in enumerate(pieces)
            ]
            try:
                for read in reads:
                    while not read.ends_within(LOOK_S) and self.clock() < began + most_s:
                        pass
            finally:
                failed = [read for read in reads if read.error is not None and read.ready]
                for read in reads:
                    read.cancel()
                for read in reads:
                    read.wait_quietly()
            for read in failed:
                read.wait()
            done, seconds = reader.metrics.reading()[0], self.clock() - began
        if not setting.direct:
            forget(extents)
        return done / seconds / 1e9 if done and seconds > 0 else 0.0

    def latency(self, repeats: int = 16) -> float:
        """Returns the median seconds of a 4 KiB read with nothing else in flight."""
        times = []
        with contextlib.closing(self._reader(self.small)) as reader:
            for _ in range(repeats):
                pieces = self.unread.take(BLOCK, self.piece)
                self.unread.take(MIB, self.piece)  # skipped, so that reads are not adjacent
                if not pieces:
                    break
                forget(pieces[0])
                began = self.clock()
                reader.submit("latency", pieces[0], self.slots[0].payload).wait()
                times.append(self.clock() - began)
        return statistics.median(times) if times else Calibration.read_latency_s

    def _reader(self, setting: ReadSetting) -> FileReader:
        io, metrics = "auto" if setting.direct else "cached", Metrics(clock=self.clock)
        return FileReader(self.unread.files, io=io, threads=setting.threads, chunk=setting.chunk, metrics=metrics)


def best_setting(bench: Bench, progress: Progress = lambda *_: None) -> Calibration:
    """Measures every setting once, then the rate of the best one for longer.

    Skips a setting with more bytes in flight than the disk reads in ``POINT_S`` seconds at the best rate so far.
    """
    what, rates, latency = "measuring the disk", dict[ReadSetting, float](), bench.latency()
    known = bench.gbps(bench.small, MIB, POINT_S)
    # The second round measures settings that the first one skipped, if the disk has turned out to be faster.
    for setting in [*bench.settings, *bench.settings]:
        progress(what, len(rates), len(bench.settings))
        if setting not in rates and (setting == bench.small or setting.in_flight <= known * 1e9 * POINT_S):
            if rates and not bench.unread.nbytes:
                break
            rates[setting] = bench.gbps(setting, bench.nbytes, POINT_S)
            known = max(known, rates[setting])
    progress(what, len(bench.settings), len(bench.settings))
    setting = choose(rates)
    rate = bench.gbps(setting, int(rates[setting] * 1e9 * RATE_S), RATE_S)
    return Calibration(
        read_gbps=rate or rates[setting],
        read_latency_s=latency,
        # "auto" falls back to cached reads for files that refuse direct ones.
        io="auto" if setting.direct else "cached",
        threads=setting.threads,
        chunk=setting.chunk,
        measured=True,
    )


def choose(rates: dict[ReadSetting, float]) -> ReadSetting:
    """Returns the fastest setting. Prefers direct reads and the default unless another is faster by ``GAIN``."""
    fastest = max(rates, key=lambda s: rates[s] / (1 if s.direct else GAIN))
    default = ReadSetting(direct=fastest.direct)
    return default if rates.get(default, 0.0) * GAIN >= rates[fastest] else fastest


# Bytes of a model's files from which no scratch file is needed, and of a scratch file: usual and smallest.
ENOUGH_BYTES, SCRATCH_BYTES, LEAST_SCRATCH = 1_500_000_000, 2_000_000_000, 512_000_000

# Most seconds of writing a scratch file, and bytes after which ``fsync`` waits for the disk.
WRITE_S, SYNC_BYTES = 12.0, 128 << 20

# Most bytes of one range.
STEP = 64 << 20

SCRATCH = ".outcore-calibrate-"

# Extents that are read into one slot.
Piece = tuple[Extent, ...]


class UnreadRanges:
    """Ranges of files, of which each is taken only once."""

    def __init__(self, extents: Iterable[Extent]) -> None:
        self._left = deque(extents)
        self.files = sorted({e.file for e in self._left})
        self.nbytes = sum(e.nbytes for e in self._left)

    def take(self, nbytes: int, piece: int) -> list[Piece]:
        """Takes the next ``nbytes`` bytes, or all that are left, as pieces that fit into slots of ``piece`` bytes."""
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


def own_files(files: Iterable[Path]) -> UnreadRanges:
    """Returns all ranges of the files, beginning at a random one."""
    sizes = {f: f.stat().st_size for f in sorted(set(files))}
    whole = [
        Extent(f, at, min(STEP, size - at), 0, in_place=True)
        for f, size in sizes.items()
        for at in range(0, size, STEP)
    ]
    start = random.randrange(len(whole))
    return UnreadRanges([*whole[start:], *whole[:start]])


@contextlib.contextmanager
def scratch_file(folder: Path, disk: int | None = None, nbytes: int | None = None) -> Iterator[Path]:
    """Yields the path of an unnamed file of random bytes that are on the disk and not in the page cache.

    Args:
        folder: created if missing.
        disk: file system (``st_dev``) on which the folder must be; None: any.
        nbytes: size; None: ``SCRATCH_BYTES``. Smaller if the disk has less than twice that free.

    Raises:
        CalibrationError: the folder is on another disk or cannot be written, or the disk is too full.
    """
    nbytes = nbytes or SCRATCH_BYTES
    least = min(nbytes, LEAST_SCRATCH)
    with contextlib.ExitStack() as stack:
        try:
            if disk is not None and disk_of(folder) != disk:
                raise CalibrationError(f"{folder}: is not on the disk to measure, so no scratch file is made there")
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            free = shutil.disk_usage(folder).free
            if free < 2 * least:
                raise CalibrationError(
                    f"{folder}: measuring the disk needs a scratch file of {format_size(least)}, but only "
                    f"{format_size(free)} are free: free some, or name a model on that disk that has "
                    f"{format_size(ENOUGH_BYTES)} or more"
                )
            number = stack.enter_context(tempfile.TemporaryFile(dir=folder, prefix=SCRATCH, buffering=0)).fileno()
            path = Path(f"/dev/fd/{number}")  # exists on Linux and macOS
            _write_random(number, min(nbytes, free // 2))
            forget([Extent(path, 0, path.stat().st_size, 0)])
        except OSError as e:
            raise CalibrationError(
                f"{folder}: no scratch file can be written to measure the disk with ({e.strerror}): make the folder "
                f"writable, or name a model on that disk that has {format_size(ENOUGH_BYTES)} or more"
            ) from e
        yield path


def disk_of(path: Path) -> int:
    """Returns the file system (``st_dev``) of a path, or of its nearest existing parent."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path.stat().st_dev


def _write_random(number: int, nbytes: int, clock: Callable[[], float] = time.perf_counter) -> None:
    """Writes ``nbytes`` random bytes, or as many as fit into ``WRITE_S`` seconds."""
    # Blocks differ, in case the disk stores equal ones once. Only the first one is drawn at random, which is slow.
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
