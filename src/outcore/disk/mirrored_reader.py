"""A reader that takes the parts of each unit from several folders with the same bytes, so that their rates add up.

Each part is asked of the folder that will have read it first, by the rates that were seen and by what each was asked
for already. So a slow disk reads little, and one that is too slow to be of use reads nothing, but for a try now and
then. What one cannot read another is asked for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import ReadError
from . import disk_calls
from .chunk import Move
from .layout import BLOCK, Extent, SlotCopy
from .metrics import Metrics
from .open_file import OpenFile
from .reader import CHUNK, THREADS, FileReader, Read, pieces
from .replica import Replicas

LEAST_CHUNK, PARTS = 256 << 10, 16
"""Bytes of a part at least, and parts of a unit, so that all have done theirs at about the same time."""

MEMORY_S = 0.5
"""Seconds of reading after which what was before counts half."""

TRY_S, TRIES = 0.25, 10
"""One that is too slow is tried again after so many seconds, and so many times what its last part took."""


class FolderPace:
    """How fast a folder is read from, of late, and how much it was asked for.

    Attributes:
        rate: bytes a second while something was under way; 0: not known.
        waiting: bytes that were asked for and have not come.
    """

    def __init__(self) -> None:
        self.rate = 0.0
        self.waiting = 0
        self._since = self._last_end = self._last_took = 0.0
        self._nbytes = self._seconds = 0.0

    def asked(self, nbytes: int, now: float) -> None:
        """So much is asked for."""
        if not self.waiting:
            self._since = now
        self.waiting += nbytes

    def ended(self, asked: int, done: int, took: float, now: float) -> None:
        """What was asked for ``took`` seconds ago has ended; ``done`` bytes of it came."""
        self.waiting -= asked
        self._last_end, self._last_took = now, took
        self._nbytes += done
        self._seconds += now - self._since
        self._since = now
        if self._seconds > 0:
            self.rate = self._nbytes / self._seconds
        if self._seconds > MEMORY_S:
            self._nbytes, self._seconds = self._nbytes / 2, self._seconds / 2

    def done_in(self, nbytes: int, fastest: float, now: float) -> float:
        """Seconds in which it would have read so much more. Whoever did nothing for long may be faster by now: its disk
        may have been asleep."""
        if self.rate and not self.waiting and now - self._last_end > max(TRY_S, TRIES * self._last_took):
            return 0.0
        return (self.waiting + nbytes) / (self.rate or fastest)


def quickest(paces: Sequence[FolderPace], who: Collection[int], nbytes: int, now: float) -> int:
    """Which of some folders will have read so much first."""
    fastest = max((paces[n].rate for n in who), default=0.0) or 1.0
    return min(who, key=lambda n: (paces[n].done_in(nbytes, fastest, now), n))


@dataclass(eq=False)
class _Part:
    """A part of a unit. ``extent`` names the model's own file; ``tried``: folders from which it could not be read."""

    whole: _Whole
    extent: Extent
    target: memoryview
    tried: set[int]


class _Whole(Read):
    """What is read of a unit, in parts by several readers."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.reads: list[Read] = []

    def cancel(self) -> None:
        self.cancelled = True
        for read in list(self.reads):
            read.cancelled = True

    def finish(self, error: ReadError | None = None, nbytes: int = 0) -> bool:
        last = super().finish(error, nbytes)
        if last:
            self.reads.clear()  # they hold the memory that was read into
        return last


class _PartRead(Read):
    """Reading a part in one folder; ``told`` when that has ended, before anybody who waits for the unit."""

    def __init__(self, name: str, told: Callable[[Read], None]) -> None:
        super().__init__(name)
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
        self._under_way: list[dict[Read, Path]] = [{} for _ in replicas.all]
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
            self._readers[0].begin(_PartRead(name, lambda read: _pass_on(whole, read)), (), target, copies)
        for extent in extents:
            for offset, nbytes in pieces(extent, most):
                whole.add()
                at = extent.at + offset - extent.offset
                self._ask(_Part(whole, replace(extent, offset=offset, nbytes=nbytes, at=at), target, set()))
        whole.finish()
        return whole

    def _ask(self, part: _Part) -> bool:
        """Have somebody read a part; False: nobody is left."""
        extent, whole = part.extent, part.whole
        with self._lock:
            holders = self._holders[extent.file]
            left = [n for n in self._replicas.in_turn(holders) if n not in part.tried]
            alive = [n for n in left if self._replicas.all[n].lost is None] or left
            if self._closed or not alive:
                return False
            began = self._clock()
            n = quickest(self._paces, alive, extent.nbytes, began)
            self._paces[n].asked(extent.nbytes, began)
            read = _PartRead(whole.name, lambda read: self._ended(part, n, began, read))
            read.cancelled = whole.cancelled
            whole.reads.append(read)
            self._under_way[n][read] = extent.file
            where = replace(extent, file=holders[n].path)
            self._readers[n].begin(read, [where], part.target)
            return True

    def _ended(self, part: _Part, n: int, began: float, read: Read) -> None:
        whole, extent = part.whole, part.extent
        with self._lock:
            now = self._clock()
            del self._under_way[n][read]
            self._paces[n].ended(extent.nbytes, 0 if read.error else extent.nbytes, now - began, now)
        self._replicas.count(n, read.nbytes)
        if read.error is not None and not whole.cancelled:
            part.tried.add(n)
            # Before others are asked: whoever waits for the unit finds the note there.
            if not read.passing and self._elsewhere(extent.file, n):
                self._lose(n, str(read.error))
            if self._ask(part):
                return
        _pass_on(whole, read)

    def _elsewhere(self, file: Path, n: int) -> bool:
        """Whether another folder that is not lost has a file."""
        return any(m != n and self._replicas.all[m].lost is None for m in self._holders[file])

    def _lose(self, n: int, why: str) -> None:
        self._replicas.lose(n, why)
        with self._lock:
            for read, file in self._under_way[n].items():
                if self._elsewhere(file, n):
                    read.cancelled = True  # and asked of another, as what fails

    def check(self) -> None:
        """As in ``Reader``, where no other folder has the file."""
        for holders in self._holders.values():
            self._replicas.check(holders)

    def close(self) -> None:
        with self._lock:
            self._closed = True
        for reader in self._readers:
            reader.close()


def _pass_on(whole: Read, part: Read) -> None:
    whole.began = whole.began or part.began
    whole.finish(part.error, part.nbytes)
