"""The reader: a few threads that read extents of files into memory, in the order of the requests."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from copy import copy as copy_of
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..disk.layout import Extent, SlotCopy
from ..errors import ReadError, UsageError
from ..machine import interrupts
from ..machine.allocator import address_of, move
from ..sizes import BLOCK
from . import disk_calls
from .metrics import Metrics
from .open_file import PASSING_ERRORS, Bounce, Chunk, Move, OpenFile, ShortRead, open_file, read_chunk

CHUNK = 8 << 20
# Concurrent reads. With 16 cores, 8 read a fast disk at 3.9 GB/s and 4 at 3.5; a warm page cache at 39 and 23.
THREADS = 4 if (os.cpu_count() or 1) < 8 else 8

ByteRows = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]

ROW_THREADS = 8  # concurrent reads of rows, of which a prompt needs many.


class Read:
    """The reads of one unit's chunks. ``wait`` returns when all bytes are in place, or raises the first error.

    Args:
        part_of: a larger read; if it is cancelled, this one is cancelled too.
        then: called with this read when it has ended, before waiting threads continue.

    Attributes:
        nbytes: bytes read from files until now, including rounding to blocks.
        passing: whether a chunk failed with an error such as a lack of memory, after which a retry may succeed.
    """

    def __init__(self, name: str, part_of: Read | None = None, then: Callable[[Any], None] | None = None) -> None:
        self.name = name
        self.error: ReadError | None = None
        self.passing = False
        self.nbytes = 0
        self._part_of, self._then = part_of, then
        self._cancelled = False
        self._left = 1  # chunks not done; ``submit`` adds the others before it queues any
        self._lock = threading.Lock()
        self._done = threading.Event()

    def add(self, chunks: int = 1) -> None:
        with self._lock:
            self._left += chunks

    def finish(self, error: ReadError | None = None, nbytes: int = 0) -> None:
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
        return self._done.is_set()

    @property
    def cancelled(self) -> bool:
        return self._cancelled or (self._part_of is not None and self._part_of.cancelled)

    def cancel(self) -> None:
        """Skip the chunks that no thread has begun to read. ``wait`` still waits for the others."""
        self._cancelled = True

    def ends_within(self, seconds: float) -> bool:
        return self._done.wait(seconds)

    def wait_quietly(self) -> None:
        """Wait until no thread writes to the buffer any more; raises no error of the read."""
        self._done.wait()

    def ended(self) -> None:
        """Like ``wait_quietly``, but handles deferred signals while it waits, so Ctrl-C raises."""
        while not self._done.wait(interrupts.POLL_S):
            interrupts.check()

    def wait(self) -> None:
        self._done.wait()
        if self.error is not None:
            # A copy, as an error that has passed frames which hold this read would be a cycle.
            raise copy_of(self.error) from self.error.__cause__


class Reader(Protocol):
    """The reader's methods that the ring calls. Tests use a reader that reads from memory.

    Attributes:
        move: copies its second argument's bytes into its first; ``FileReader``'s is replaced where a GPU has the slots.
    """

    move: Move

    @property
    def direct(self) -> bool: ...

    def submit(self, name: str, extents: Sequence[Extent], target: memoryview, copies: Sequence[SlotCopy] = ()) -> Read:
        """Start reading ``extents``, and copying ``copies``, into ``target``; returns at once."""

    def check(self) -> None:
        """Check the files that were read since the last call. Raises ``ReadError`` if one was written to since it was
        opened."""

    def close(self) -> None:
        """End the threads and close the files. Safe to call twice."""


class FileReader:
    """Reads extents with a few threads.

    Args:
        files: every file that extents will name. The reader closes those that are passed open.
        io: ``direct`` bypasses the page cache and fails if the file system refuses; ``cached`` reads through it;
            ``random`` does so without read-ahead; ``auto`` is direct where it works, else cached.
        threads: concurrent reads.
        chunk: bytes of one read, a multiple of 4096.
        looks: check after every chunk whether its file was written to, and not only in ``check``.

    Attributes:
        bounces: whether the system refused to read into a slot; from then on reads go through the threads' buffers.

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
        read = Read(name) if read is None else read
        address, end, tasks = address_of(target) if extents else 0, 0, list[Chunk | SlotCopy]()
        for extent in extents:
            end = max(end, extent.at + extent.nbytes)
            file = self._files[extent.file]
            # Checked, because a misaligned direct read returns wrong bytes, fails, or on macOS uses the page cache.
            whole = extent.in_place and address % BLOCK == 0 and (extent.at - extent.offset) % BLOCK == 0
            for offset, nbytes in pieces(extent, self._chunk):
                at = extent.at + offset - extent.offset
                tasks.append(Chunk(file, offset, nbytes, target, at, whole))
        for copy in copies:
            end = max(end, copy.at + len(copy.source))
            tasks.append(copy)
        if end > len(target):
            raise ValueError(f"{name} does not fit in a buffer of {len(target)} bytes")
        if not tasks:
            read.finish()
            return read
        read.add(len(tasks) - 1)
        for task in tasks:
            self._queue.put((read, task, target))
        return read

    def check(self) -> None:
        check_files(self._files.values())

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
                # Copied even if the read was cancelled: that needs no disk.
                failed: ReadError | None = None
                try:
                    self.move(target[what.at : what.at + len(what.source)], what.source)
                except OSError as e:
                    failed = ReadError(f"{read.name}: its bytes in memory could not be copied to the slot: {e}")
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
                check_times(file)
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
        # Counted before the read is finished, so that a waiting thread sees the bytes.
        self.metrics.read_ended(done)
        read.finish(error, done)
        del read, error  # the error's traceback has this frame


def check_files(files: Iterable[OpenFile]) -> None:
    """Calls ``check_times`` for each file that bytes were read from since the last check."""
    for file in files:
        if file.read:
            file.read = False  # before it is checked: a read meanwhile sets it again, so that another check follows
            try:
                check_times(file)
            except (ReadError, OSError):
                file.read = True
                raise


def check_times(file: OpenFile) -> None:
    """Compare a file's size and times with those at opening.

    A write can be hidden by setting the old ``st_mtime`` again (``cp -p`` does), but not from ``st_ctime``, which
    cannot be set. A new link, mode or owner also changes ``st_ctime``; then a sample of blocks is compared.

    Raises:
        ReadError: the file was written to.
    """
    now, was = os.fstat(file.cached), file.was
    times = now.st_ctime_ns == was.st_ctime_ns and now.st_mtime_ns == was.st_mtime_ns
    if not file.watched or (times and now.st_size == was.st_size):
        return
    content = (now.st_size, now.st_mtime_ns) != (was.st_size, was.st_mtime_ns)
    status = [(s.st_nlink, s.st_mode, s.st_uid, s.st_gid) for s in (now, was)]
    if content or status[0] == status[1] or file.sampled() != file.blocks:
        raise ReadError(
            f"{file.path}: was written to while the model ran; its last answer may be wrong: load the model again"
        )
    file.was = now


def pieces(extent: Extent, most: int) -> list[tuple[int, int]]:
    """Split an extent into parts of at most ``most`` bytes, as (offset, bytes).

    Parts end at multiples of ``most`` in the file, so only the outer ones need rounding to blocks.
    """
    found, offset, end = [], extent.offset, extent.offset + extent.nbytes
    while offset < end:
        nbytes = min(end - offset, most - offset % most)
        found.append((offset, nbytes))
        offset += nbytes
    return found


class RowReader:
    """Reads single rows of tensors through the page cache, which keeps rows that are read often.

    Args:
        make: called with ``files`` and settings; returns the reader to use.
    """

    def __init__(
        self, files: Sequence[Path], metrics: Metrics | None = None, make: Callable[..., Reader] = FileReader
    ) -> None:
        self.metrics = metrics or Metrics()
        self._reader = make(files, io="random", threads=ROW_THREADS)
        self.ahead: dict[tuple[Any, ...], tuple[ByteRows, Read]] = {}  # from ``submit``, by path, offset and rows

    def submit(self, path: Path, offset: int, nbytes: int, rows: Sequence[int], name: str) -> tuple[ByteRows, Read]:
        """Starts reading as ``read`` does. Returns the array, and the read that fills it."""
        out = np.empty((len(rows), nbytes), dtype=np.uint8)
        extents = [Extent(path, offset + row * nbytes, nbytes, i * nbytes) for i, row in enumerate(rows)]
        return out, self._reader.submit(f"rows of {name}", extents, out.reshape(-1).data)

    def read(self, path: Path, offset: int, nbytes: int, rows: Sequence[int], name: str) -> ByteRows:
        """Read rows of ``nbytes`` bytes each; row 0 begins at ``offset``. Returns uint8 of shape (rows, nbytes)."""
        key = path, offset, *rows
        out, read = self.ahead.pop(key) if key in self.ahead else self.submit(path, offset, nbytes, rows, name)
        began = self.metrics.clock()
        read.ended()
        read.wait()
        self.metrics.stall_s += self.metrics.clock() - began
        self.metrics.rows_read += len(rows)
        return out

    def check(self) -> None:
        self._reader.check()

    def close(self) -> None:
        self._reader.close()
