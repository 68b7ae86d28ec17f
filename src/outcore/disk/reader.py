"""Parallel positional reads straight into a buffer: files and bytes, nothing of models.

``os.preadv`` releases the GIL, so plain threads saturate a disk: chunks of 8 MiB, 4 to 8 in flight. Reads bypass the
page cache where the system allows it (``disk_calls``): a model larger than memory would only push everything else
out of it. Direct reads are of whole blocks into whole blocks, on every system: the disk writes straight into the slot
where address and offset agree, else into a buffer of the thread's own, from which the bytes are copied.
"""

from __future__ import annotations

import errno
import mmap
import os
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ..errors import ReadError, UsageError
from ..system import interrupts
from ..system.device_memory import address_of, move, prepare_slot
from . import disk_calls
from .disk_calls import DiskCalls
from .file_stamp import Stamp
from .layout import BLOCK, PAGE, Copy, Extent, round_up
from .metrics import Metrics

CHUNK = 8 << 20
THREADS = 4 if (os.cpu_count() or 1) < 8 else 8
"""Reads in flight. With 16 cores, 8 read a fast disk at 3.9 GB/s and 4 at 3.5; a warm page cache at 39 and 23."""

_DISK_ERRORS = {errno.EIO, errno.ESTALE, errno.EBADF}
"""What a read fails with wherever it goes: anything else may be about the memory that it should go to."""


_PASSING_ERRORS = {errno.ENOMEM, errno.EAGAIN, errno.EINTR}
"""What says nothing about the next read."""


Move = Callable[[memoryview, memoryview], None]


class Read:
    """Reads under way for one unit. ``wait`` returns when all bytes are in place, or raises what went wrong."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.error: ReadError | None = None
        self.cancelled = False
        self.began = 0.0  # when the first chunk was taken up; 0 before
        self._left = 1  # one is held by the submitter until every chunk is queued
        self._lock = threading.Lock()
        self._done = threading.Event()

    def add(self) -> None:
        with self._lock:
            self._left += 1

    def finish(self, error: ReadError | None = None) -> bool:
        """One chunk less; returns whether it was the last."""
        with self._lock:
            self.error = self.error or error
            self._left -= 1
            last = self._left == 0
        if last:
            self._done.set()
        return last

    @property
    def ready(self) -> bool:
        """Whether every chunk has ended, well or badly."""
        return self._done.is_set()

    @property
    def failed(self) -> bool:
        """Whether it has ended badly."""
        return self.ready and self.error is not None

    def cancel(self) -> None:
        """Skip the chunks that have not begun. ``wait`` still waits for those that have."""
        self.cancelled = True

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

    def submit(self, name: str, extents: Sequence[Extent], target: memoryview, copies: Sequence[Copy] = ()) -> Read:
        """Begin to read ``extents`` into ``target`` (bytes ``at`` and on), and to copy what is in memory already, and
        return at once."""

    def check(self) -> None:
        """Raise ``ReadError`` if a file of which something was read since the last time was written to since it was
        opened."""

    def close(self) -> None:
        """End the threads and close the files. Safe to call twice."""


@dataclass(eq=False)
class OpenFile:
    """A file that is open: by descriptors that read through the page cache, and around it.

    Attributes:
        stamp: tells whether it was written to since; None: it may be.
        read: since it was last looked at, something was read from it.
    """

    path: Path
    stamp: Stamp | None
    cached: int
    direct: int | None
    read: bool = False


@dataclass(frozen=True)
class _Chunk:
    read: Read
    file: OpenFile
    offset: int
    nbytes: int
    target: memoryview
    in_place: bool


@dataclass(frozen=True)
class _Copied:
    read: Read
    source: memoryview
    target: memoryview


_Task = _Chunk | _Copied


@dataclass
class _Slots:
    """What a reader has learnt of the memory that it reads into, and how bytes come there from elsewhere."""

    refused: bool = False
    move: Move = move


class FileReader:
    """Reads extents with a few threads.

    Args:
        files: every file that extents will name; those that are open already are the reader's to close.
        io: ``direct`` bypasses the page cache and fails where the file system refuses; ``cached`` reads through
            it; ``auto`` is direct where it works, else cached.
        threads: reads in flight at once.
        chunk: bytes of one read, a multiple of 4096.

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
    ) -> None:
        if chunk <= 0 or chunk % BLOCK:
            raise UsageError(f"a chunk of {chunk} bytes is not a positive multiple of {BLOCK}")
        self.metrics = metrics or Metrics()
        self.chunk = chunk
        self._calls = disk_calls.system()
        self._slots = _Slots()
        self._files: dict[Path, OpenFile] = {}
        self._queue: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._closed = False
        self._close_lock = threading.Lock()
        try:
            for file in dict.fromkeys(files):
                opened = open_file(file, io, self._calls) if isinstance(file, Path) else file
                self._files[opened.path] = opened
        except BaseException:
            self._close_files()
            raise
        self._threads = [
            threading.Thread(
                target=_serve,
                args=(self._queue, self.metrics, self._calls, self._slots),
                name=f"outcore-read-{i}",
                daemon=True,
            )
            for i in range(threads)
        ]
        try:
            for t in self._threads:
                t.start()
        except BaseException:
            self._threads = [t for t in self._threads if t.ident is not None]
            self.close()
            raise

    @property
    def direct(self) -> bool:
        """Whether every file is read around the page cache."""
        return all(f.direct is not None for f in self._files.values())

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

    def submit(self, name: str, extents: Sequence[Extent], target: memoryview, copies: Sequence[Copy] = ()) -> Read:
        if any(e.at + e.nbytes > len(target) for e in extents) or any(
            c.at + len(c.source) > len(target) for c in copies
        ):
            raise ValueError(f"{name} does not fit in a buffer of {len(target)} bytes")
        read = Read(name)
        # What does not lie as it says would be wrong bytes, a refusal, or on macOS a read through the page cache.
        aligned = any(e.in_place for e in extents) and address_of(target) % BLOCK == 0
        for extent in extents:
            file = self._files[extent.file]
            offset, at, left = extent.offset, extent.at, extent.nbytes
            while left:
                # Chunks end at multiples of the chunk size, so that only the outer ones need rounding to blocks.
                n = min(left, self.chunk - offset % self.chunk)
                in_place = extent.in_place and file.direct is not None and aligned and (at - offset) % BLOCK == 0
                into = slice(at - at % BLOCK, round_up(at + n, BLOCK)) if in_place else slice(at, at + n)
                read.add()
                self._queue.put(_Chunk(read, file, offset, n, target[into], in_place))
                offset, at, left = offset + n, at + n, left - n
        for copy in copies:
            read.add()
            self._queue.put(_Copied(read, copy.source, target[copy.at : copy.at + len(copy.source)]))
        read.finish()
        return read

    def check(self) -> None:
        for f in self._files.values():
            if f.stamp is not None and f.read:
                f.read = False  # before it is looked at: what is read meanwhile is looked at the next time
                try:
                    f.stamp.check()
                except ReadError:
                    f.read = True
                    raise

    def close(self) -> None:
        with self._close_lock:
            if self._closed:
                return
            self._closed = True
        for _ in self._threads:
            self._queue.put(None)
        for t in self._threads:
            t.join()
        self._close_files()

    def _close_files(self) -> None:
        for f in self._files.values():
            self._calls.close(f.cached)
            if f.direct is not None:
                self._calls.close(f.direct)
        self._files.clear()


def open_file(path: Path, io: str, calls: DiskCalls) -> OpenFile:
    try:
        fd = calls.open_cached(path)
    except OSError as e:
        raise ReadError(f"{path}: cannot be opened: {e.strerror}") from e
    stamp = Stamp(path, fd, calls)
    direct = calls.open_direct(path) if io != "cached" else None
    if direct is None and io == "direct":
        calls.close(fd)
        raise UsageError(f"{path}: this file system refuses direct reads; use --io auto or cached")
    return OpenFile(path, stamp, fd, direct)


def _serve(chunks: queue.SimpleQueue[_Task | None], metrics: Metrics, calls: DiskCalls, slots: _Slots) -> None:
    bounce = _Bounce()
    while (chunk := chunks.get()) is not None:
        if isinstance(chunk, _Copied):
            # Also where the read was cancelled: it takes no disk.
            failed: ReadError | None = None
            try:
                slots.move(chunk.target, chunk.source)
            except OSError as e:
                failed = ReadError(f"{chunk.read.name}: what is in memory could not be copied: {e}")
            chunk.read.finish(failed)
            del chunk
            continue
        if chunk.read.cancelled:
            chunk.read.finish(ReadError(f"{chunk.file.path}: reading {chunk.read.name} was cancelled"))
            continue
        metrics.read_started()
        chunk.read.began = chunk.read.began or metrics.clock()
        done, error = 0, None
        try:
            done = _read_chunk(chunk, bounce, calls, slots)
        except OSError as e:
            error = _failure(chunk, e.strerror or str(e))
        except ShortRead as e:
            error = _failure(chunk, f"the file ended {e.missing} bytes early; it changed since the model was loaded")
        except (ValueError, MemoryError) as e:
            error = _failure(chunk, str(e) or type(e).__name__)
        # Counted before the read is finished: who waits for it sees the bytes that it brought.
        metrics.read_ended(done)
        chunk.file.read = True
        if chunk.read.finish(error):
            metrics.note("read", chunk.read.name, chunk.read.began)
        del chunk


def _failure(chunk: _Chunk, why: str) -> ReadError:
    end = chunk.offset + chunk.nbytes
    return ReadError(f"{chunk.file.path}: reading {chunk.read.name}, bytes {chunk.offset} to {end}, failed: {why}")


class ShortRead(Exception):
    """A file ended before a read did."""

    def __init__(self, missing: int) -> None:
        self.missing = missing


class _Bounce:
    """A thread's own buffer for direct reads, made when first needed; in large pages, as slots are."""

    def __init__(self) -> None:
        self._view = memoryview(b"")

    def take(self, nbytes: int) -> memoryview:
        if len(self._view) < nbytes:
            size = round_up(nbytes, PAGE)
            # Private memory: the kernel gives shared mappings no large pages unless told to.
            view = memoryview(mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
            start = -address_of(view) % PAGE
            prepare_slot(address_of(view) + start, size, "cpu")
            self._view = view[start : start + size]
        return self._view[:nbytes]


def _read_chunk(chunk: _Chunk, bounce: _Bounce, calls: DiskCalls, slots: _Slots) -> int:
    """Read one chunk and return the bytes read from the file."""
    file, start, end = chunk.file, chunk.offset, chunk.offset + chunk.nbytes
    if file.direct is None:
        if slots.move is move:
            return fill(calls, file.cached, chunk.target, start, chunk.nbytes)
        buffer = bounce.take(chunk.nbytes)
        done = fill(calls, file.cached, buffer, start, chunk.nbytes)
        slots.move(chunk.target, buffer)
        return done
    first = start - start % BLOCK
    refused: int | None = None
    if chunk.in_place and not slots.refused:
        try:
            return fill(calls, file.direct, chunk.target, first, end - first, step=BLOCK)
        except OSError as e:
            # A GPU's memory, perhaps: xnu answers EFAULT where it cannot wire it (cluster_io_type, vfs_cluster.c).
            if e.errno in _DISK_ERRORS:
                raise
            refused = e.errno or 0
    buffer = bounce.take(round_up(end, BLOCK) - first)
    done = fill(calls, file.direct, buffer, first, end - first, step=BLOCK)
    if refused is not None and refused not in _PASSING_ERRORS:
        slots.refused = True  # the memory's fault: the same read into other memory succeeded
    skipped = start - first
    into = chunk.target[skipped:] if chunk.in_place else chunk.target  # a place of whole blocks, or the bytes' own
    slots.move(into[: chunk.nbytes], buffer[skipped : end - first])
    return done


def fill(calls: DiskCalls, fd: int, target: memoryview, offset: int, need: int, step: int = 1) -> int:
    """Read until ``need`` bytes are there. A read that ends off ``step`` has met the end of the file."""
    done = 0
    while done < need:
        n = calls.preadv(fd, target[done:], offset + done)
        done += n
        if done < need and (n <= 0 or n % step):
            raise ShortRead(need - done)
    return done
