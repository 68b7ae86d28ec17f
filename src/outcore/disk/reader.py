"""The reader: a few threads that read extents of files into memory, in the order in which they were asked for."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..disk.layout import Extent, SlotCopy
from ..errors import ReadError, UsageError
from ..machine import interrupts
from ..machine.device_memory import address_of, move
from ..sizes import BLOCK
from . import disk_calls
from .chunk import PASSING_ERRORS, Bounce, Chunk, Move, ShortRead, read_chunk
from .metrics import Metrics
from .open_file import OpenFile, open_file

CHUNK = 8 << 20
THREADS = 4 if (os.cpu_count() or 1) < 8 else 8
"""Reads in flight. With 16 cores, 8 read a fast disk at 3.9 GB/s and 4 at 3.5; a warm page cache at 39 and 23."""

ROW_THREADS = 8
"""Rows read at once, where a prompt asks for many."""


class Read:
    """Reads under way for one unit. ``wait`` returns when all bytes are in place, or raises what went wrong.

    Args:
        part_of: the read that this is a part of, which cancels it too.
        then: called with this read when it has ended, before anybody who waits for it goes on.

    Attributes:
        nbytes: bytes that files gave so far, block rounding included.
        passing: what went wrong says nothing about the file or its disk.
    """

    def __init__(self, name: str, part_of: Read | None = None, then: Callable[[Any], None] | None = None) -> None:
        self.name = name
        self.error: ReadError | None = None
        self.passing = False
        self.nbytes = 0
        self._part_of, self._then = part_of, then
        self._cancelled = False
        self._left = 1  # one is held by the submitter until every chunk is queued
        self._lock = threading.Lock()
        self._done = threading.Event()

    def add(self, chunks: int = 1) -> None:
        with self._lock:
            self._left += chunks

    def finish(self, error: ReadError | None = None, nbytes: int = 0) -> None:
        """One chunk less."""
        with self._lock:
            self.error = self.error or error
            self.nbytes += nbytes
            self._left -= 1
            last = self._left == 0
        if last:
            if self._then is not None:
                self._then(self)
            self._done.set()

    @property
    def ready(self) -> bool:
        """Whether every chunk has ended, well or badly."""
        return self._done.is_set()

    @property
    def failed(self) -> bool:
        """Whether it has ended badly."""
        return self.error is not None and self.ready

    @property
    def cancelled(self) -> bool:
        """Whether chunks that have not begun are skipped."""
        return self._cancelled or (self._part_of is not None and self._part_of.cancelled)

    def cancel(self) -> None:
        """Skip the chunks that have not begun. ``wait`` still waits for those that have."""
        self._cancelled = True

    def ends_within(self, seconds: float) -> bool:
        """Wait for so long at most; whether it has ended, well or badly."""
        return self._done.wait(seconds)

    def wait_quietly(self) -> None:
        """Wait until no thread writes to the buffer any more; errors are ignored."""
        self._done.wait()

    def ended(self) -> None:
        """The same, but a signal that is held meanwhile is handled, and may raise."""
        interrupts.wait(self._done)

    def wait(self) -> None:
        self._done.wait()
        if self.error is not None:
            raise self.error


class Reader(Protocol):
    """What the ring needs of a reader; tests use one that reads from memory.

    Attributes:
        move: copies all of a second stretch of memory into a first; another, where some of it is on a device.
    """

    move: Move

    @property
    def direct(self) -> bool:
        """Whether every file is read around the page cache."""

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
            it; ``random`` does so and asks for nothing ahead; ``auto`` is direct where it works, else cached.
        threads: reads in flight at once.
        chunk: bytes of one read, a multiple of 4096.
        looks: look at a file after each chunk that was read from it, and not only in ``check``.

    Attributes:
        move: as in ``Reader``; what is read in place is not moved.
        bounces: the system refused to read into slots, so all goes through buffers of the threads' own.

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
        looks: bool = False,
    ) -> None:
        if chunk <= 0 or chunk % BLOCK:
            raise UsageError(f"a chunk of {chunk} bytes is not a positive multiple of {BLOCK}")
        self.metrics = metrics or Metrics()
        self.move: Move = move
        self.bounces = False
        self._chunk, self._looks = chunk, looks
        self._calls = disk_calls.system()
        self._queue: queue.SimpleQueue[tuple[Read, Chunk | SlotCopy, memoryview] | None] = queue.SimpleQueue()
        self._files: dict[Path, OpenFile] = {f.path: f for f in files if isinstance(f, OpenFile)}
        self._threads: list[threading.Thread] = []
        self._closed = False
        self._close_lock = threading.Lock()
        try:
            for file in files:
                if isinstance(file, Path) and file not in self._files:
                    self._files[file] = open_file(file, io, self._calls)
            for i in range(threads):
                thread = threading.Thread(target=self._serve, name=f"outcore-read-{i}", daemon=True)
                thread.start()
                self._threads.append(thread)
        except BaseException:
            self.close()
            raise

    @property
    def direct(self) -> bool:
        return all(f.direct is not None for f in self._files.values())

    def submit(
        self,
        name: str,
        extents: Sequence[Extent],
        target: memoryview,
        copies: Sequence[SlotCopy] = (),
        read: Read | None = None,
    ) -> Read:
        """As in ``Reader``; ``read`` is told what becomes of it."""
        read = Read(name) if read is None else read
        address, end, tasks = address_of(target) if extents else 0, 0, list[Chunk | SlotCopy]()
        for extent in extents:
            end = max(end, extent.at + extent.nbytes)
            file = self._files[extent.file]
            # What does not lie as it says would be wrong bytes, a refusal, or on macOS a read through the page cache.
            whole = extent.in_place and address % BLOCK == 0 and (extent.at - extent.offset) % BLOCK == 0
            for offset, nbytes in pieces(extent, self._chunk):
                at = extent.at + offset - extent.offset
                tasks.append(Chunk(file, offset, nbytes, target, at, whole))
        for copy in copies:
            end = max(end, copy.at + len(copy.source))
            tasks.append(copy)
        if end > len(target):
            raise ValueError(f"{name} does not fit in a buffer of {len(target)} bytes")
        read.add(len(tasks))
        for task in tasks:
            self._queue.put((read, task, target))
        read.finish()
        return read

    def check(self) -> None:
        for file in self._files.values():
            file.check()

    def close(self) -> None:
        with self._close_lock:
            if self._closed:
                return
            self._closed = True
        for _ in self._threads:
            self._queue.put(None)
        for t in self._threads:
            t.join()
        for f in self._files.values():
            f.close()
        self._files.clear()

    def _serve(self) -> None:
        bounce = Bounce()
        while (task := self._queue.get()) is not None:
            read, what, target = task
            del task
            if isinstance(what, Chunk):
                self._read(read, what, bounce)
            else:
                # Also where the read was cancelled: it takes no disk.
                failed: ReadError | None = None
                try:
                    self.move(target[what.at : what.at + len(what.source)], what.source)
                except OSError as e:
                    failed = ReadError(f"{read.name}: what is in memory could not be copied: {e}")
                read.finish(failed)
            del read, what, target

    def _read(self, read: Read, chunk: Chunk, bounce: Bounce) -> None:
        file = chunk.file
        if read.cancelled:
            read.finish(ReadError(f"{file.path}: reading {read.name} was cancelled"))
            return
        self.metrics.read_started()
        done, why, error = 0, "", None
        try:
            done, refused = read_chunk(chunk, bounce, self._calls, self.move, self.bounces)
            self.bounces |= refused
            file.read = True
            if self._looks:
                file.look()
        except ShortRead as e:
            why = f"the file ended {e.missing} bytes early; it changed since the model was loaded"
        except ReadError as e:
            error = e
        except (OSError, ValueError, MemoryError) as e:
            read.passing = not isinstance(e, OSError) or e.errno in PASSING_ERRORS
            why = (e.strerror if isinstance(e, OSError) else None) or str(e) or type(e).__name__
        if why:
            end = chunk.offset + chunk.nbytes
            error = ReadError(f"{file.path}: reading {read.name}, bytes {chunk.offset} to {end}, failed: {why}")
            file.read = True
        # Counted before the read is finished: who waits for it sees the bytes that it brought.
        self.metrics.read_ended(done)
        read.finish(error, done)


def pieces(extent: Extent, most: int) -> list[tuple[int, int]]:
    """Offsets and bytes of an extent's parts, none of more than ``most`` bytes. They end at multiples of that in the
    file, so that only the outer ones need rounding to blocks."""
    found, offset, end = [], extent.offset, extent.offset + extent.nbytes
    while offset < end:
        nbytes = min(end - offset, most - offset % most)
        found.append((offset, nbytes))
        offset += nbytes
    return found


class RowReader:
    """Reads single rows of tensors, wherever they lie, through the page cache: rows that come often stay in it.

    Args:
        make: what makes the reader.

    Raises:
        ReadError: a file cannot be opened.
    """

    def __init__(
        self, files: Sequence[Path], metrics: Metrics | None = None, make: Callable[..., Reader] = FileReader
    ) -> None:
        self.metrics = metrics or Metrics()
        self._reader = make(files, io="random", threads=ROW_THREADS)

    def read(
        self, path: Path, offset: int, nbytes: int, rows: Sequence[int], name: str
    ) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
        """Rows of ``nbytes`` bytes each, the first of which begins at ``offset``; uint8 of shape (rows, nbytes).

        Raises:
            ReadError: the file is too short, or the disk failed.
        """
        out = np.empty((len(rows), nbytes), dtype=np.uint8)
        extents = [Extent(path, offset + row * nbytes, nbytes, i * nbytes) for i, row in enumerate(rows)]
        read = self._reader.submit(f"rows of {name}", extents, out.reshape(-1).data)
        read.ended()
        read.wait()
        self.metrics.rows_read += len(rows)
        return out

    def check(self) -> None:
        """Raise ``ReadError`` if a file that rows were read from was written to since it was opened."""
        self._reader.check()

    def close(self) -> None:
        self._reader.close()
