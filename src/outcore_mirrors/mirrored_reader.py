"""A reader that reads parts of each unit from several folders with the same files, so that the disks' rates add up.

Each part is read from the folder that will finish it first, by the folder's measured rate and the bytes that were
already requested from it. A slow disk therefore reads little, and one too slow to help reads nothing. If a folder
fails, another reads the part.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from outcore.disk import disk_calls
from outcore.disk.disk_calls import DiskCalls
from outcore.disk.layout import Extent, SlotCopy
from outcore.disk.metrics import Metrics
from outcore.disk.open_file import Move, OpenFile, open_file
from outcore.disk.reader import CHUNK, THREADS, FileReader, Read, check_files, pieces
from outcore.errors import ReadError
from outcore.machine.small_files import state_of
from outcore.sizes import BLOCK

LEAST_CHUNK, PARTS = 256 << 10, 16  # least bytes of a part; most parts of a unit, so that folders finish together
LEARN = 4  # most parts requested at a time from a folder whose rate is unknown
MEMORY_S = 0.5  # seconds of reading after which earlier measurements count half


@dataclass(eq=False)
class Replica:
    """A folder to read from.

    Attributes:
        copies: this folder's copy of each of the model's files; None: this is the model's own folder.
        states: each copy's ``state_of`` when it was compared with the model's file.
        lost: why the folder is no longer read; None: it is read.
        nbytes: bytes read from the folder.
    """

    folder: Path
    copies: Mapping[Path, Path] | None = None
    states: Mapping[Path, tuple[int, ...]] | None = None
    lost: str | None = None
    nbytes: int = 0

    def changed(self, copy: Path) -> bool:
        return self.states is not None and state_of(copy) != self.states.get(copy)


class Replicas:
    """A model's own folder and its mirrors. A folder that is lost once is not read again.

    Attributes:
        all: the folders, the model's own first.
        note: called, in any thread, when a folder is lost.
    """

    def __init__(self, folder: Path, mirrors: Sequence[Replica] = (), note: Callable[[str], None] = lambda _: None):
        self.all = (Replica(folder), *mirrors)
        self.note = note
        self._lock = threading.Lock()

    @property
    def mirrors(self) -> tuple[Replica, ...]:
        return self.all[1:]

    def open(self, file: Path, io: str, calls: DiskCalls) -> dict[int, OpenFile]:
        """Opens a file in each folder that has it; returns the open files by the folders' numbers. A folder whose copy
        is missing or has changed is lost."""
        found: dict[int, OpenFile] = {}
        failed: dict[int, ReadError] = {}
        for n, replica in enumerate(self.all):
            copy = file if replica.copies is None else replica.copies.get(file)
            if copy is None or (n and replica.lost is not None):
                continue
            try:
                opened = open_file(copy, io, calls)
                if replica.changed(copy):
                    opened.close()
                    raise ReadError(f"{copy}: was written to")
                found[n] = opened
            except ReadError as e:
                failed[n] = e
        for n, error in failed.items():
            if not found:
                raise error
            self.lose(n, str(error))
        return found

    def check(self, holders: Mapping[int, OpenFile]) -> None:
        """Checks one file in each folder. A folder whose file has changed is lost if another folder has the file.

        Raises:
            ReadError, OSError: the file changed, and no other folder has it.
        """
        for n, file in holders.items():
            try:
                check_files([file])
            except (ReadError, OSError) as e:
                if all(self.all[m].lost is not None for m in holders if m != n):
                    raise
                file.read = False
                self.lose(n, str(e))

    def lose(self, n: int, why: str) -> None:
        """Stops reading from a folder, unless it is the last one left."""
        replica = self.all[n]
        with self._lock:
            left = [str(r.folder) for r in self.all if r.lost is None and r is not replica]
            if replica.lost is not None or not left:
                return
            replica.lost = why
        self.note(f"{replica.folder} is no longer read: {why}; its files are read from {', '.join(left)}")

    def count(self, n: int, nbytes: int) -> None:
        with self._lock:
            self.all[n].nbytes += nbytes


class FolderPace:
    """How fast a folder was read recently, and what is requested from it.

    Attributes:
        rate: bytes per second while anything was requested; 0: unknown.
        waiting: bytes requested and not read yet. ``parts``: the number of these requests.
    """

    def __init__(self) -> None:
        self.rate = self._since = self._nbytes = self._seconds = 0.0
        self.waiting = self.parts = 0

    def requested(self, nbytes: int, now: float) -> None:
        if not self.parts:
            self._since = now
        self.waiting, self.parts = self.waiting + nbytes, self.parts + 1

    def ended(self, nbytes: int, came: bool, now: float) -> None:
        """Records the end of a requested part. ``came``: it was read without an error."""
        self.waiting, self.parts = self.waiting - nbytes, self.parts - 1
        self._nbytes += nbytes if came else 0
        self._seconds, self._since = self._seconds + now - self._since, now
        if self._seconds > 0:
            self.rate = self._nbytes / self._seconds
        if self._seconds > MEMORY_S:
            self._nbytes, self._seconds = self._nbytes / 2, self._seconds / 2

    def done_in(self, nbytes: int) -> float:
        """Returns the seconds until ``nbytes`` more are read. Unknown rate: 0 up to ``LEARN`` parts, else infinity."""
        if not self.rate:
            return 0.0 if self.parts < LEARN else math.inf
        return (self.waiting + nbytes) / self.rate


def quickest(paces: Sequence[FolderPace], folders: Collection[int], nbytes: int) -> int:
    """Returns the number of the folder that will finish first; of equal ones the first."""
    return min(folders, key=lambda n: (paces[n].done_in(nbytes), n))


class MirroredReader:
    """Reads from several folders, with a ``FileReader`` for each.

    Args:
        threads: number of threads for each folder. The other arguments are as in ``FileReader``.
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
        self._under_way: dict[Read, tuple[int, Path]] = {}
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
                unread.close()
            raise

    @property
    def direct(self) -> bool:
        return all(reader.direct for reader in self._readers)

    @property
    def move(self) -> Move:
        return self._readers[0].move

    @move.setter
    def move(self, move: Move) -> None:
        for reader in self._readers:
            reader.move = move

    def submit(self, name: str, extents: Sequence[Extent], target: memoryview, copies: Sequence[SlotCopy] = ()) -> Read:
        whole = Read(name)
        part = max(LEAST_CHUNK, sum(e.nbytes for e in extents) // PARTS)
        most = min(self._chunk, part - part % BLOCK)
        if copies:
            whole.add()
            self._readers[0].submit(name, (), target, copies, Read(name, whole, partial(_pass_on, whole)))
        for extent in extents:
            for offset, nbytes in pieces(extent, most):
                whole.add()
                piece = replace(extent, offset=offset, nbytes=nbytes, at=extent.at + offset - extent.offset)
                if not self._ask(whole, piece, target, frozenset()):
                    whole.finish(ReadError(f"{name}: the reader was closed"))
        whole.finish()
        return whole

    def _ask(self, whole: Read, extent: Extent, target: memoryview, tried: frozenset[int]) -> bool:
        with self._lock:
            holders = self._holders[extent.file]
            left = [n for n in holders if n not in tried]
            alive = [n for n in left if self._replicas.all[n].lost is None] or left
            if self._closed or not alive:
                return False
            n = quickest(self._paces, alive, extent.nbytes)
            part = Read(whole.name, whole, lambda part: self._ended(part, whole, extent, target, tried | {n}, n))
            self._paces[n].requested(extent.nbytes, self._clock())
            self._under_way[part] = n, extent.file
            self._readers[n].submit(whole.name, [replace(extent, file=holders[n].path)], target, (), part)
            return True

    def _ended(
        self, part: Read, whole: Read, extent: Extent, target: memoryview, tried: frozenset[int], n: int
    ) -> None:
        with self._lock:
            del self._under_way[part]
            self._paces[n].ended(extent.nbytes, part.error is None, self._clock())
        self._replicas.count(n, part.nbytes)
        if part.error is not None and not whole.cancelled:
            # ``note`` is called before the retry, so that the thread that waits for the unit finds the note.
            if not part.passing and self._elsewhere(extent.file, n):
                self._lose(n, str(part.error))
            if self._ask(whole, extent, target, tried):
                return
            if part.cancelled and (why := self._replicas.all[n].lost):
                part.error = ReadError(why)  # it was cancelled for this
        _pass_on(whole, part)

    def _elsewhere(self, file: Path, n: int) -> bool:
        return any(m != n and self._replicas.all[m].lost is None for m in self._holders[file])

    def _lose(self, n: int, why: str) -> None:
        self._replicas.lose(n, why)
        with self._lock:
            for part, (folder, file) in self._under_way.items():
                if folder == n and self._elsewhere(file, n):
                    part.cancel()  # then requested from another folder, like a failed part

    def check(self) -> None:
        for holders in self._holders.values():
            self._replicas.check(holders)

    def close(self) -> None:
        with self._lock:
            self._closed = True
        for reader in self._readers:
            reader.close()


def _pass_on(whole: Read, part: Read) -> None:
    whole.finish(part.error, part.nbytes)
