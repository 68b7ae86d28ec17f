"""Parallel positional reads straight into a buffer: files and bytes, nothing of models.

``os.preadv`` releases the GIL, so plain threads saturate a disk: chunks of 8 MiB, 4 to 8 in flight. Reads bypass the
page cache where the system allows it (``disk_calls``): a model larger than memory would only push everything else
out of it. Direct reads are of whole blocks into whole blocks, on every system: the disk writes straight into the slot
where address and offset agree, else into a buffer of the thread's own, from which the bytes are copied.

Where other folders have the same files (``replica``), each has threads of its own, and all take their chunks from one
queue.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from ..errors import ReadError, UsageError
from ..machine.device_memory import address_of
from . import disk_calls
from .chunk import PASSING_ERRORS, Bounce, Chunk, Copied, Move, ShortRead, Slots, Task, read_chunk
from .chunk_queue import ChunkQueue, ManyFolders, OneFolder
from .disk_calls import DiskCalls
from .layout import BLOCK, Extent, SlotCopy
from .metrics import Metrics
from .open_file import OpenFile, open_file
from .read import Read
from .replica import Replica, Replicas

__all__ = ["CHUNK", "THREADS", "FileReader", "Read", "Reader"]

CHUNK = 8 << 20
THREADS = 4 if (os.cpu_count() or 1) < 8 else 8
"""Reads in flight. With 16 cores, 8 read a fast disk at 3.9 GB/s and 4 at 3.5; a warm page cache at 39 and 23."""

LEAST_CHUNK, PARTS = 256 << 10, 16
"""Where several folders share a unit: bytes of a chunk at least, and chunks of a unit, so that all have done their part
of it at about the same time."""


class Reader(Protocol):
    """What the ring needs of a reader; tests use one that reads from memory.

    Attributes:
        move: copies all of a second stretch of memory into a first; another, where some of it is on a device.
    """

    move: Move

    def submit(self, name: str, extents: Sequence[Extent], target: memoryview, copies: Sequence[SlotCopy] = ()) -> Read:
        """Begin to read ``extents`` into ``target`` (bytes ``at`` and on), and to copy what is in memory already, and
        return at once."""

    def check(self) -> None:
        """Raise ``ReadError`` if a file of which something was read since the last time was written to since it was
        opened."""

    def close(self) -> None:
        """End the threads and close the files. Safe to call twice."""


class FileReader:
    """Reads extents with a few threads.

    Args:
        files: every file that extents will name; those that are open already are the reader's to close.
        io: ``direct`` bypasses the page cache and fails where the file system refuses; ``cached`` reads through
            it; ``auto`` is direct where it works, else cached.
        threads: reads in flight at once.
        chunk: bytes of one read, a multiple of 4096; less where a unit comes from several folders.
        replicas: folders that have some of these files as well; None: none. ``threads`` is for each of them.

    Raises:
        ReadError: a file cannot be opened.
        UsageError: ``io="direct"`` on a file system without direct I/O.
    """

    def __init__(
        self,
        files: Sequence[Path | OpenFile],
        *,
        io: str = "auto",
        threads: int = THREADS,
        chunk: int = CHUNK,
        metrics: Metrics | None = None,
        replicas: Replicas | None = None,
    ) -> None:
        if chunk <= 0 or chunk % BLOCK:
            raise UsageError(f"a chunk of {chunk} bytes is not a positive multiple of {BLOCK}")
        self.metrics = metrics or Metrics()
        self.chunk = chunk
        self._calls = disk_calls.system()
        self._slots = Slots()
        self._replicas = replicas if replicas is not None and len(replicas) > 1 else None
        self._queue: ChunkQueue = OneFolder() if self._replicas is None else ManyFolders(self._replicas)
        self._files: dict[Path, OpenFile] = {}
        self._copies: list[dict[Path, OpenFile]] = []
        self._closed = False
        self._close_lock = threading.Lock()
        try:
            if self._replicas is not None:
                self._open_copies(self._replicas, files, io)
            for file in dict.fromkeys(files):
                opened = self._open(file, io) if isinstance(file, Path) else file
                if opened is not None:
                    self._files[opened.path] = opened
        except BaseException:
            self._close_files()
            raise
        several = self._replicas is not None
        self._threads = [
            threading.Thread(
                target=_serve,
                args=(self._queue, n, several, self.metrics, self._calls, self._slots),
                name=f"outcore-read-{n}-{i}",
                daemon=True,
            )
            for n, count in enumerate(self._lanes(threads))
            for i in range(count)
        ]
        try:
            for t in self._threads:
                t.start()
        except BaseException:
            self._threads = [t for t in self._threads if t.ident is not None]
            self.close()
            raise

    def _lanes(self, threads: int) -> list[int]:
        """Threads of each replica."""
        if self._replicas is None:
            return [threads]
        return [threads, *(mirror.threads or threads for mirror in self._replicas.mirrors)]

    def _open_copies(self, replicas: Replicas, files: Sequence[Path | OpenFile], io: str) -> None:
        """Open what mirrors have of the files. Where one is not what was compared, its mirror is lost."""
        paths = dict.fromkeys(file if isinstance(file, Path) else file.path for file in files)
        for n, mirror in enumerate(replicas.all[1:], start=1):
            self._copies.append({})
            for path in paths:
                copy = mirror.copy_of(path)
                if copy is None or mirror.lost is not None:
                    continue
                try:
                    self._copies[-1][path] = open_file(copy, self._how(mirror, io), self._calls)
                    if mirror.changed(copy):
                        raise ReadError(f"{copy}: was written to")
                except ReadError as e:
                    replicas.lose(n, str(e))

    @staticmethod
    def _how(mirror: Replica, io: str) -> str:
        return mirror.io if io == "auto" and mirror.io is not None else io

    def _open(self, file: Path, io: str) -> OpenFile | None:
        """A file of the model's own folder; None: it cannot be opened any more, but a mirror has it."""
        try:
            return open_file(file, io, self._calls)
        except ReadError as e:
            if self._replicas is None or not any(file in copies for copies in self._copies):
                raise
            self._replicas.lose(0, str(e))
            return None

    @property
    def direct(self) -> bool:
        """Whether every file is read around the page cache."""
        return all(f.direct is not None for f in self._opened())

    @property
    def move(self) -> Move:
        """As in ``Reader``. Only what is not read in place is moved."""
        return self._slots.move

    @move.setter
    def move(self, move: Move) -> None:
        self._slots.move = move

    @property
    def bounces(self) -> bool:
        """Whether the system refused to read into slots, so that all goes through buffers of the threads' own."""
        return self._slots.refused

    def submit(self, name: str, extents: Sequence[Extent], target: memoryview, copies: Sequence[SlotCopy] = ()) -> Read:
        if any(e.at + e.nbytes > len(target) for e in extents) or any(
            c.at + len(c.source) > len(target) for c in copies
        ):
            raise ValueError(f"{name} does not fit in a buffer of {len(target)} bytes")
        read = Read(name)
        # What does not lie as it says would be wrong bytes, a refusal, or on macOS a read through the page cache.
        aligned = any(e.in_place for e in extents) and address_of(target) % BLOCK == 0
        most = self._most(sum(e.nbytes for e in extents))
        tasks: list[Task] = []
        for extent in extents:
            files = (self._files.get(extent.file), *(copies.get(extent.file) for copies in self._copies))
            offset, at, left = extent.offset, extent.at, extent.nbytes
            while left:
                # Chunks end at multiples of the chunk size, so that only the outer ones need rounding to blocks.
                n = min(left, most - offset % most)
                whole = extent.in_place and aligned and (at - offset) % BLOCK == 0
                tasks.append(Chunk(read, extent.file, files, offset, n, target, at, whole))
                offset, at, left = offset + n, at + n, left - n
        tasks += [Copied(read, c.source, target[c.at : c.at + len(c.source)]) for c in copies]
        for _ in tasks:
            read.add()
        self._queue.put(tasks)
        read.finish()
        return read

    def _most(self, nbytes: int) -> int:
        """Bytes of a chunk of a unit of so many."""
        if self._replicas is None:
            return self.chunk
        part = max(LEAST_CHUNK, nbytes // PARTS)
        return min(self.chunk, part - part % BLOCK)

    def check(self) -> None:
        for path in {**self._files, **{p: f for copies in self._copies for p, f in copies.items()}}:
            for n, files in enumerate((self._files, *self._copies)):
                file = files.get(path)
                if file is not None and file.stamp is not None and file.read:
                    self._check(n, path, file)

    def _check(self, n: int, path: Path, file: OpenFile) -> None:
        assert file.stamp is not None
        file.read = False  # before it is looked at: what is read meanwhile is looked at the next time
        try:
            file.stamp.check()
        except (ReadError, OSError) as e:
            if self._replicas is not None and self._elsewhere(n, path):
                # What was read from it was looked at after each chunk: it is only that no more may be.
                self._replicas.lose(n, str(e))
                return
            file.read = True
            raise

    def _elsewhere(self, n: int, path: Path) -> bool:
        """Whether another replica, that was not lost, has the file."""
        assert self._replicas is not None
        folders = zip(self._replicas.all, (self._files, *self._copies), strict=True)
        return any(path in files and r.lost is None for m, (r, files) in enumerate(folders) if m != n)

    def close(self) -> None:
        with self._close_lock:
            if self._closed:
                return
            self._closed = True
        self._queue.close(len(self._threads))
        for t in self._threads:
            t.join()
        self._close_files()

    def _close_files(self) -> None:
        for f in self._opened():
            self._calls.close(f.cached)
            if f.direct is not None:
                self._calls.close(f.direct)
        for files in (self._files, *self._copies):
            files.clear()

    def _opened(self) -> list[OpenFile]:
        return [f for files in (self._files, *self._copies) for f in files.values()]


def _serve(queue: ChunkQueue, replica: int, several: bool, metrics: Metrics, calls: DiskCalls, slots: Slots) -> None:
    bounce = Bounce()
    while (task := queue.take(replica)) is not None:
        if isinstance(task, Copied):
            # Also where the read was cancelled: it takes no disk.
            failed: ReadError | None = None
            try:
                slots.move(task.target, task.source)
            except OSError as e:
                failed = ReadError(f"{task.read.name}: what is in memory could not be copied: {e}")
            task.read.finish(failed)
            del task
            continue
        chunk, file = task, task.files[replica]
        assert file is not None
        del task
        if chunk.read.cancelled:
            queue.ended(replica, chunk, 0)
            chunk.read.finish(ReadError(f"{file.path}: reading {chunk.read.name} was cancelled"))
            continue
        metrics.read_started()
        chunk.read.began = chunk.read.began or metrics.clock()
        done, error, its_fault = 0, None, True
        try:
            done = read_chunk(chunk, file, bounce, calls, slots)
            if several and file.stamp is not None:
                # Others can still read it, so nothing that was written over it gets into an answer.
                file.stamp.check()
        except OSError as e:
            error = _failure(chunk, file, e.strerror or str(e))
            its_fault = e.errno not in PASSING_ERRORS
        except ShortRead as e:
            error = _failure(
                chunk, file, f"the file ended {e.missing} bytes early; it changed since the model was loaded"
            )
        except ReadError as e:
            error = e
        except (ValueError, MemoryError) as e:
            error = _failure(chunk, file, str(e) or type(e).__name__)
            its_fault = False
        # Counted before the read is finished: who waits for it sees the bytes that it brought.
        metrics.read_ended(done)
        queue.ended(replica, chunk, done)
        file.read = True
        if error is not None and its_fault and queue.failed(replica, chunk, str(error)):
            continue
        if chunk.read.finish(error):
            metrics.note("read", chunk.read.name, chunk.read.began)
        del chunk


def _failure(chunk: Chunk, file: OpenFile, why: str) -> ReadError:
    end = chunk.offset + chunk.nbytes
    return ReadError(f"{file.path}: reading {chunk.read.name}, bytes {chunk.offset} to {end}, failed: {why}")
