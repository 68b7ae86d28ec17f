"""What a disk gives the reader: by size of a request, by requests in flight, around the page cache and through it."""

from __future__ import annotations

import contextlib
import math
import os
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..disk import disk_calls
from ..disk.cold_ranges import Piece, UnreadRanges, forget, forget_before
from ..disk.layout import BLOCK, Extent, round_up
from ..disk.metrics import Metrics
from ..disk.reader import CHUNK, THREADS, FileReader, Read
from ..disk.ring import Slot
from ..machine.device import device_kind
from ..machine.memory import default_budget
from ..plan.machine_profile import Calibration, DiskPoint

MIB = 1 << 20
CHUNKS = (MIB, 4 * MIB, 8 * MIB, 32 * MIB)
IN_FLIGHT = (1, 2, 4, 8, 16) if (os.cpu_count() or 1) >= 8 else (1, 2, 4, 8)
"""Requests in flight that are tried around it; ``DiskCalls.lanes`` are more."""
CACHED = (1, 4, 8)
"""Requests in flight that are tried through the page cache, of the default size."""

PIECE = 64 * MIB
"""Bytes read into a slot at once: as large as a layer of a model of 2 to 4 GB."""

MOST, LEAST = 256 * MIB, MIB
"""Bytes of one measurement: as many as the files give."""

ROUNDS = 3
"""Turns of the best settings, of which the medians count: disks drift."""

BESIDE = 2
"""Bytes of one measurement beside computing, over those of one without: at least, and up to what is left."""

MOST_BESIDE = 1 << 30
"""Bytes of one measurement beside computing at most."""

UNIT, UNITS, UNITS_S = 8 * MIB, 16, 0.3
"""Bytes of a small unit, how many are read one after the other, and seconds that they should take at most."""

AHEAD = (1, 2, 4)
"""Units asked for at a time: what rings of two, three, and five slots do."""

LEAST_UNIT_S = 1e-7
"""What is said where a unit costs nothing."""

POINT_S, DISK_S = 1.5, 15.0
"""Seconds of one measurement at most, and of all of them. What is in flight when they are over is waited for: a setting
that has more in flight than the disk reads in ``POINT_S`` is not measured."""

LOOK_S = 0.05
"""Seconds after which a read that is waited for is looked at again."""

CACHED_GAIN = 1.1
"""Reading through the page cache must be that much faster to be chosen: it pushes out what others use."""

DEFAULT_GAIN = 1.03
"""And any other setting than the default that much faster than it: less is chance."""

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class ReadSetting:
    """A way to read: requests of ``chunk`` bytes, ``threads`` at a time, around the page cache or through it."""

    chunk: int
    threads: int
    direct: bool

    @property
    def in_flight(self) -> int:
        """Bytes asked for at a time."""
        return self.chunk * self.threads

    def open(self, files: Sequence[Path], clock: Callable[[], float] = time.perf_counter) -> FileReader:
        """A reader of these files that reads so."""
        io = "auto" if self.direct else "cached"
        return FileReader(files, io=io, threads=self.threads, chunk=self.chunk, metrics=Metrics(clock=clock))


DEFAULT = ReadSetting(CHUNK, THREADS, True)


class Bench:
    """Slots to read into and ranges to read, of which each measurement takes the next.

    Args:
        clock: tells seconds; a measurement breaks off after ``POINT_S`` of them.
    """

    def __init__(self, unread: UnreadRanges, clock: Callable[[], float] = time.perf_counter) -> None:
        self.unread = unread
        self.clock = clock
        self._rate = 0.0  # bytes a second: the best so far
        direct = _reads_direct(unread.files)
        lanes = sorted({*IN_FLIGHT, *disk_calls.system().lanes})
        self.settings = [ReadSetting(c, n, True) for c in CHUNKS for n in lanes] if direct else []
        self.settings += [ReadSetting(CHUNK, n, False) for n in CACHED]
        self.nbytes = _affordable(self.settings, unread.nbytes)
        self.settings = [s for s in self.settings if 2 * s.in_flight <= 4 * self.nbytes] or self.settings[:1]
        self.piece = max(4 * BLOCK, min(PIECE, self.nbytes // 2, default_budget() // 16))
        device = device_kind()
        count = max(3, -(-max(s.in_flight for s in self.settings) // self.piece) + 1)
        self.slots = [Slot(round_up(self.piece, BLOCK), device) for _ in range(min(count, 6))]

    def gbps(self, setting: ReadSetting) -> float:
        """GB/s of ranges that were not read before; 0 if there are none left."""
        pieces = self.unread.take(_needed(setting, self.nbytes), self.piece)
        return self._gbps(setting, pieces)

    def begin(self) -> None:
        """Find out about how fast the disk is, by one small read."""
        least = min(self.settings, key=lambda s: s.in_flight)
        self._gbps(replace(least, chunk=MIB, threads=1), self.unread.take(MIB, self.piece))

    def has_time(self, setting: ReadSetting) -> bool:
        """Whether the disk, as fast as it was found to be so far, reads what a setting has in flight in ``POINT_S``; of
        the smallest setting it is taken to."""
        return setting.in_flight <= max(self._rate * POINT_S, min(s.in_flight for s in self.settings))

    def _gbps(self, setting: ReadSetting, pieces: Sequence[Piece]) -> float:
        extents = [e for piece in pieces for e in piece]
        forget_before(setting.direct, extents)
        reader = setting.open(sorted({e.file for e in extents}))
        try:
            nbytes, seconds = read_in_turn(reader, pieces, self.slots, POINT_S, self.clock)
        finally:
            reader.close()
        if not setting.direct:
            forget(extents)
        self._rate = max(self._rate, nbytes / seconds if nbytes else 0.0)
        return nbytes / seconds / 1e9 if nbytes else 0.0

    def latency(self, setting: ReadSetting, repeats: int = 16) -> float:
        """Seconds that a read of 4 KiB takes with nothing else in flight: median."""
        times = []
        with contextlib.closing(replace(setting, threads=1).open(self.unread.files)) as reader:
            for _ in range(repeats):
                pieces = self.unread.take(BLOCK, self.piece)
                self.unread.take(MIB, self.piece)  # passed over: the next read is not next to this one
                if not pieces:
                    break
                forget_before(setting.direct, pieces[0])
                began = self.clock()
                reader.submit("latency", pieces[0], self.slots[0].payload).wait()
                times.append(self.clock() - began)
        return statistics.median(times) if times else Calibration.read_latency_s

    def unit_seconds(self, setting: ReadSetting, gbps: float) -> dict[int, float]:
        """Seconds that the read of a unit takes beyond its bytes at the disk's rate, by units asked for at a time: what
        a ring of few slots pays for each, to begin it and to see it end. Medians, in turns with a rate taken anew;
        empty where there is too little to read, and behind a disk so slow that there is no time for it.

        Args:
            gbps: about what the setting gives.
        """
        unit = min(UNIT, self.piece // BLOCK * BLOCK)
        count = int(min(UNITS, max(2, UNITS_S * gbps * 1e9 / unit)))
        found: dict[int, list[float]] = {ahead: [] for ahead in AHEAD if ahead < len(self.slots)}
        if count * unit > gbps * 1e9 * POINT_S:
            return {}
        with contextlib.closing(setting.open(self.unread.files)) as reader:

            def seconds(slots: Sequence[Slot]) -> float | None:
                pieces = self.unread.take(count * unit, unit)
                forget_before(setting.direct, (e for piece in pieces for e in piece))
                nbytes, taken = read_in_turn(reader, pieces, slots, POINT_S, self.clock)
                return taken / nbytes * unit if nbytes >= count * unit // 2 else None

            for _ in range(ROUNDS):
                deep = seconds(self.slots)
                for ahead in found:
                    few = seconds(self.slots[:ahead])
                    if deep is not None and few is not None:
                        found[ahead].append(few - deep)
        return {ahead: max(LEAST_UNIT_S, statistics.median(each)) for ahead, each in found.items() if each}


def read_in_turn(
    reader: FileReader,
    pieces: Sequence[Piece],
    slots: Sequence[Slot],
    most_s: float,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[int, float]:
    """Read the pieces, one to a slot and each slot again when it is done, for ``most_s`` seconds at most: what has not
    begun by then is not read. Returns bytes and seconds."""
    under_way: deque[Read] = deque()
    began = clock()
    before, _ = reader.metrics.reading()
    in_time = True
    try:
        for i, piece in enumerate(pieces):
            if len(under_way) == len(slots):
                in_time = ends_by(under_way[0], began + most_s, clock)
                if not in_time:
                    break
                under_way.popleft().wait()
            under_way.append(reader.submit("calibration", piece, slots[i % len(slots)].payload))
        while in_time and under_way:
            in_time = ends_by(under_way[0], began + most_s, clock)
            if in_time:
                under_way.popleft().wait()
    finally:
        stop(under_way)
    return reader.metrics.reading()[0] - before, clock() - began


def ends_by(read: Read, end: float, clock: Callable[[], float]) -> bool:
    """Wait for a read until ``end`` at most; whether it has ended by then."""
    while not read.ends_within(LOOK_S):
        if clock() > end:
            return False
    return clock() <= end


def stop(reads: Iterable[Read]) -> None:
    """Have no more of these read than has begun, and wait for that.

    Raises:
        ReadError: of one that was not stopped, it failed.
    """
    failed = [read for read in reads if read.failed]
    for read in reads:
        read.cancel()
    for read in reads:
        read.wait_quietly()
    for read in failed:
        read.wait()


@dataclass(frozen=True)
class Best:
    """The setting that reads best, GB/s of it, seconds of a small read, every measurement, and by how much of their
    median those of that setting differ."""

    setting: ReadSetting
    gbps: float
    latency_s: float
    points: tuple[DiskPoint, ...]
    spread: float = 0.0


def best_setting(bench: Bench, progress: Progress = lambda *_: None, most_s: float = DISK_S) -> Best:
    """Measure every setting once, then those that may be the best in turns; no further one after ``most_s`` seconds."""
    what, began = "measuring the disk", bench.clock()
    bench.begin()
    latency = bench.latency(DEFAULT if any(s.direct for s in bench.settings) else replace(DEFAULT, direct=False))
    rates: dict[ReadSetting, list[float]] = {}
    # The default first: on a slow disk there is no time for all.
    settings = sorted(bench.settings, key=lambda s: (s.threads != THREADS, s.chunk != CHUNK))
    # What there was no time for may have some when the disk was seen to read faster with more in flight.
    for setting in [*settings, *settings]:
        progress(what, len(rates), len(settings))
        if rates and (bench.clock() - began > most_s * 0.7 or not bench.unread.nbytes):
            break
        if setting not in rates and bench.has_time(setting):
            rates[setting] = [bench.gbps(setting)]
    for _ in range(ROUNDS - 1):
        for setting in _finalists(rates):
            if bench.clock() - began < most_s and bench.unread.nbytes:
                rates[setting].append(bench.gbps(setting))
    progress(what, len(settings), len(settings))
    medians = {s: statistics.median(r) for s, r in rates.items()}
    points = tuple(DiskPoint(s.chunk, s.threads, s.direct, round(rate, 4)) for s, rate in sorted(
        medians.items(), key=lambda p: (not p[0].direct, p[0].chunk, p[0].threads)
    ))  # fmt: skip
    # What was measured once may have had a lucky moment.
    most = max(len(r) for r in rates.values())
    setting = choose({s: m for s, m in medians.items() if len(rates[s]) == most})
    return Best(setting, medians[setting], latency, points, spread_of(rates[setting]))


def spread_of(rates: Sequence[float]) -> float:
    """Largest less smallest, over the median; 0 of nothing."""
    middle = statistics.median(rates) if rates else 0.0
    return (max(rates) - min(rates)) / middle if middle > 0 else 0.0


def choose(rates: dict[ReadSetting, float]) -> ReadSetting:
    """The fastest, but direct reads unless cached ones are clearly faster, and the default unless another one is."""
    fastest = max(rates, key=lambda s: rates[s] / (1 if s.direct else CACHED_GAIN))
    default = replace(DEFAULT, direct=fastest.direct)
    return default if default in rates and rates[default] * DEFAULT_GAIN >= rates[fastest] else fastest


def _finalists(rates: dict[ReadSetting, list[float]]) -> list[ReadSetting]:
    """The two best of the direct ones and the default, and the best of the cached ones if it is near."""
    ranked = sorted(rates, key=lambda s: -rates[s][0])
    direct = [s for s in ranked if s.direct]
    cached = [s for s in ranked if not s.direct]
    if not direct:
        return cached
    near = [s for s in cached[:1] if rates[s][0] >= rates[direct[0]][0]]
    return [*direct[:2], *(s for s in direct[2:] if s == DEFAULT), *near]


def _needed(setting: ReadSetting, nbytes: int) -> int:
    """Bytes of one measurement: twice what is in flight at least, or its end would count for too much."""
    return max(nbytes, 2 * setting.in_flight)


def _affordable(settings: Sequence[ReadSetting], nbytes: int) -> int:
    """Bytes of one measurement with which the ``nbytes`` of all files suffice."""
    each = MOST
    while each > LEAST:
        tried = sum(_needed(s, each) for s in settings if 2 * s.in_flight <= 4 * each)
        if tried + (ROUNDS - 1) * 4 * each + 2 * ROUNDS * BESIDE * each + 20 * MIB <= nbytes:
            break
        each = each * 9 // 10
    return each


def _reads_direct(files: Sequence[Path]) -> bool:
    with contextlib.closing(FileReader(files, threads=1)) as reader:
        return reader.direct


class BackgroundReads:
    """Reads with one setting that run by themselves, for something else to run beside; ranges not read before.

    Args:
        nbytes: to be read each time; ``most_s``: or as many as that takes.
    """

    def __init__(self, bench: Bench, setting: ReadSetting, nbytes: int, most_s: float = math.inf) -> None:
        self._bench, self._direct, self._nbytes, self._most_s = bench, setting.direct, nbytes, most_s
        self._reader = setting.open(bench.unread.files, bench.clock)

    def begin(self) -> Callable[[], bool]:
        """Begin to read, and return a function that says whether it has ended."""
        pieces = self._bench.unread.take(self._nbytes, self._bench.piece)
        forget_before(self._direct, (e for piece in pieces for e in piece))
        self._reader.metrics.reset()
        slots = self._bench.slots
        # All at once: threads take them up in order, so that no two pieces are read into one slot at a time.
        self._reads = [
            self._reader.submit("calibration", piece, slots[i % len(slots)].payload) for i, piece in enumerate(pieces)
        ]
        self._end = self._bench.clock() + self._most_s
        return lambda: all(read.ready for read in self._reads) or self._bench.clock() > self._end

    def gbps(self) -> float:
        """Wait for the end; GB/s while reads were under way."""
        for read in self._reads:
            if not ends_by(read, self._end, self._bench.clock):
                break
        stop(self._reads)
        return self._reader.metrics.read_gbps

    def close(self) -> None:
        """End the threads and close the files."""
        self._reader.close()


def disk_rate_now(
    files: Sequence[Path],
    calibration: Calibration,
    seconds: float = 1.0,
    rng: random.Random | None = None,
    clock: Callable[[], float] = time.perf_counter,
    most_bytes: int | None = None,
) -> float:
    """GB/s that these files' disk gives at the moment, with the calibration's setting; about ``seconds`` of reading.

    Reads each range once, at random places, so that it is unlikely to meet one that some cache holds.

    Args:
        most_bytes: of memory to read into; None: a part of what is free.

    Raises:
        ReadError: a file cannot be opened or read.
    """
    sizes = {file: file.stat().st_size for file in files}
    share = default_budget() // 16 if most_bytes is None else most_bytes // 4
    piece = max(BLOCK, min(PIECE // 2, share // BLOCK * BLOCK))
    places = [
        Extent(file, at, min(piece, size - at), 0, in_place=True)
        for file, size in sizes.items()
        for at in range(0, size, piece)
    ]
    (rng or random.Random()).shuffle(places)
    device = device_kind()
    slots = [Slot(round_up(piece, BLOCK), device) for _ in range(3)]
    setting = ReadSetting(calibration.chunk or CHUNK, calibration.threads or THREADS, calibration.io != "cached")
    nbytes, spent = 0, 0.0
    with contextlib.closing(setting.open(files)) as reader:
        while places and spent < seconds:
            batch = [(places.pop(),) for _ in range(min(8, len(places)))]
            forget_before(reader.direct, (e for (e,) in batch))
            n, s = read_in_turn(reader, batch, slots, max(0.05, seconds - spent), clock)
            nbytes, spent = nbytes + n, spent + s
    return nbytes / spent / 1e9 if spent else 0.0
