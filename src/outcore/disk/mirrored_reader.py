"""A reader that takes the parts of each unit from several folders with the same bytes, so that their rates add up.

Each part is asked of the folder that will have read it first, by the rates that were seen and by what each was asked
for already. So a slow disk reads little, and one that is too slow to be of use reads nothing, but for a try now and
then. What one cannot read another is asked for.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

from ..disk.layout import Extent, SlotCopy
from ..errors import ReadError
from ..sizes import BLOCK
from . import disk_calls
from .chunk import Move
from .metrics import Metrics
from .open_file import OpenFile
from .reader import CHUNK, THREADS, FileReader, Read, pieces
from .replica import Replicas
from .row_reader import RowReader

LEAST_CHUNK, PARTS = 256 << 10, 16
"""Bytes of a part at least, and parts of a unit, so that all have done theirs at about the same time."""

EACH = 128 << 10
"""Bytes that could have been read in the time that a read takes whatever its size."""

LEARN = 4
"""Parts that somebody is asked for whose rate is not known."""

MEMORY_S = 0.5
"""Seconds of reading after which what was before counts half."""

TRY_S, TRIES = 0.25, 30
"""One that is too slow is tried again after so many seconds, and so many times what its last part took."""


class FolderPace:
    """How fast a folder is read from, of late, and how much it was asked for. Bytes are counted with ``EACH`` for every
    part.

    Attributes:
        rate: bytes a second while something was under way; 0: not known.
        waiting: bytes that were asked for and have not come, in so many ``parts``.
    """

    def __init__(self) -> None:
        self.rate = 0.0
        self.waiting = self.parts = 0
        self._since = self._last_end = self._last_took = 0.0
        self._nbytes = self._seconds = 0.0

    def asked(self, nbytes: int, now: float) -> None:
        """A part is asked for."""
        if not self.parts:
            self._since = now
        self.waiting, self.parts = self.waiting + nbytes + EACH, self.parts + 1

    def ended(self, nbytes: int, came: bool, took: float, now: float) -> None:
        """What was asked for ``took`` seconds ago has ended, well or badly."""
        self.waiting, self.parts = self.waiting - nbytes - EACH, self.parts - 1
        self._last_end, self._last_took = now, took
        self._nbytes += nbytes + EACH if came else 0
        self._seconds += now - self._since
        self._since = now
        if self._seconds > 0:
            self.rate = self._nbytes / self._seconds
        if self._seconds > MEMORY_S:
            self._nbytes, self._seconds = self._nbytes / 2, self._seconds / 2

    def done_in(self, nbytes: int, now: float) -> float:
        """Seconds in which it would have read so much more. Whoever is not known is asked for ``LEARN`` parts, and who
        did nothing for long for one: its disk may have been asleep."""
        if not self.rate:
            return 0.0 if self.parts < LEARN else math.inf
        if not self.parts and now - self._last_end > max(TRY_S, TRIES * self._last_took):
            return 0.0
        return (self.waiting + nbytes + EACH) / self.rate


def quickest(paces: Sequence[FolderPace], who: Collection[int], nbytes: int, now: float) -> int:
    """Which of some folders will have read so much first; the first of them where none is known."""
    return min(who, key=lambda n: (paces[n].done_in(nbytes, now), n))


class _Whole(Read):
    """What is read of a unit, in parts by several readers."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.parts: list[Read] = []

    def cancel(self) -> None:
        self.cancelled = True
        for part in list(self.parts):
            part.cancelled = True

    def finish(self, error: ReadError | None = None, nbytes: int = 0) -> bool:
        last = super().finish(error, nbytes)
        if last:
            self.parts.clear()  # they hold the memory that was read into
        return last


class _Part(Read):
    """Reading a part of a unit in one folder; ``told`` when that has ended, before anybody who waits for the unit.

    Attributes:
        extent: names the model's own file; None: what is in memory already. ``tried``: folders that could not read it.
    """

    def __init__(
        self, whole: _Whole, extent: Extent | None, target: memoryview, tried: frozenset[int], told: Callable[..., None]
    ) -> None:
        super().__init__(whole.name)
        self.whole, self.extent, self.target, self.tried = whole, extent, target, tried
        self.cancelled = whole.cancelled
        self.folder, self.asked = 0, 0.0
        self._told = told

    def finish(self, error: ReadError | None = None, nbytes: int = 0) -> bool:
        last = super().finish(error, nbytes)
        if last:
            self._told(self)
        return last


class MirroredReader:
    """A ``FileReader`` for each folder.

    Args:
        replicas: the folders.
        files, io, threads, chunk, metrics: as in ``FileReader``; ``threads`` of each folder.

    Raises:
        ReadError: nobody has a file.
        UsageError: as ``FileReader``.
    """

    def __init__(
        self,
        replicas: Replicas,
        files: Sequence[Path],
        *,
        io: str = "auto",
        threads: int = THREADS,
        chunk: int = CHUNK,
        metrics: Metrics | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._replicas, self._chunk, self._clock = replicas, chunk, clock
        self._paces = [FolderPace() for _ in replicas.all]
        self._under_way: set[_Part] = set()
        self._lock = threading.RLock()
        self._closed = False
        self._holders: dict[Path, dict[int, OpenFile]] = {}
        self._readers: list[FileReader] = []
        calls, metrics = disk_calls.system(), metrics or Metrics()
        try:
            for file in dict.fromkeys(files):
                self._holders[file] = replicas.open(file, io, calls)
            for n in range(len(replicas.all)):
                own = [opened[n] for opened in self._holders.values() if n in opened]
                self._readers.append(FileReader(own, threads=threads, chunk=chunk, metrics=metrics, looks=True))
        except BaseException:
            self.close()
            for unread in [file for opened in self._holders.values() for file in opened.values()]:
                unread.close(calls)
            raise

    @property
    def direct(self) -> bool:
        """Whether every file is read around the page cache."""
        return all(reader.direct for reader in self._readers)

    @property
    def move(self) -> Move:
        """As in ``Reader``."""
        return self._readers[0].move

    @move.setter
    def move(self, move: Move) -> None:
        for reader in self._readers:
            reader.move = move

    def submit(self, name: str, extents: Sequence[Extent], target: memoryview, copies: Sequence[SlotCopy] = ()) -> Read:
        whole = _Whole(name)
        part = max(LEAST_CHUNK, sum(e.nbytes for e in extents) // PARTS)
        most = min(self._chunk, part - part % BLOCK)
        if copies:
            whole.add()
            self._readers[0].begin(_Part(whole, None, target, frozenset(), self._pass_on), (), target, copies)
        for extent in extents:
            for offset, nbytes in pieces(extent, most):
                whole.add()
                piece = replace(extent, offset=offset, nbytes=nbytes, at=extent.at + offset - extent.offset)
                if not self._ask(whole, piece, target):
                    whole.finish(ReadError(f"{name}: the reader was closed"))
        whole.finish()
        return whole

    def _ask(self, whole: _Whole, extent: Extent, target: memoryview, tried: frozenset[int] = frozenset()) -> bool:
        """Have somebody read a part; False: nobody is left."""
        with self._lock:
            holders = self._holders[extent.file]
            left = [n for n in holders if n not in tried]
            alive = [n for n in left if self._replicas.all[n].lost is None] or left
            if self._closed or not alive:
                return False
            part = _Part(whole, extent, target, tried, self._ended)
            part.asked = self._clock()
            part.folder = n = quickest(self._paces, alive, extent.nbytes, part.asked)
            self._paces[n].asked(extent.nbytes, part.asked)
            whole.parts.append(part)
            self._under_way.add(part)
            self._readers[n].begin(part, [replace(extent, file=holders[n].path)], target)
            return True

    def _ended(self, part: _Part) -> None:
        extent, n = part.extent, part.folder
        assert extent is not None
        with self._lock:
            now = self._clock()
            self._under_way.discard(part)
            self._paces[n].ended(extent.nbytes, part.error is None, now - part.asked, now)
        self._replicas.count(n, part.nbytes)
        if part.error is not None and not part.whole.cancelled:
            # Before others are asked: whoever waits for the unit finds the note there.
            if not part.passing and self._elsewhere(extent.file, n):
                self._lose(n, str(part.error))
            if self._ask(part.whole, extent, part.target, part.tried | {n}):
                return
        self._pass_on(part)

    @staticmethod
    def _pass_on(part: _Part) -> None:
        part.whole.began = part.whole.began or part.began
        part.whole.finish(part.error, part.nbytes)

    def _elsewhere(self, file: Path, n: int) -> bool:
        """Whether another folder that is not lost has a file."""
        return any(m != n and self._replicas.all[m].lost is None for m in self._holders[file])

    def _lose(self, n: int, why: str) -> None:
        self._replicas.lose(n, why)
        with self._lock:
            for part in self._under_way:
                if part.folder == n and part.extent is not None and self._elsewhere(part.extent.file, n):
                    part.cancelled = True  # and asked of another, as what fails

    def check(self) -> None:
        """As in ``Reader``, where no other folder has the file."""
        for holders in self._holders.values():
            self._replicas.check(holders)

    def close(self) -> None:
        with self._lock:
            self._closed = True
        for reader in self._readers:
            reader.close()


class MirroredRowReader(RowReader):
    """Reads rows from the first of several folders that can: so few bytes take no longer from one disk."""

    def __init__(self, replicas: Replicas, files: Sequence[Path], metrics: Metrics | None = None) -> None:
        self._replicas = replicas
        self._holders: dict[Path, dict[int, OpenFile]] = {}
        super().__init__(files, metrics)

    def _open(self, path: Path) -> None:
        self._holders[path] = self._replicas.open(path, "cached", self._calls)
        for opened in self._holders[path].values():
            self._calls.expect_random(opened.cached)

    def _read(self, path: Path, offset: int, target: memoryview, what: str) -> None:
        holders = self._holders[path]
        left = sorted(holders, key=lambda n: self._replicas.all[n].lost is not None)  # lost ones last
        while left:
            n = left.pop(0)
            file = holders[n]
            try:
                self._fill(file, offset, target, what)
                if len(holders) > 1 and file.stamp is not None:
                    file.stamp.check()
                return
            except (OSError, ReadError) as e:
                failed = e if isinstance(e, ReadError) else ReadError(f"{file.path}: reading {what} failed: {e}")
                if not left:
                    raise failed from e
                self._replicas.lose(n, str(failed))

    def check(self) -> None:
        for holders in self._holders.values():
            self._replicas.check(holders)

    def close(self) -> None:
        super().close()
        for holders in self._holders.values():
            for file in holders.values():
                file.close(self._calls)
        self._holders.clear()
