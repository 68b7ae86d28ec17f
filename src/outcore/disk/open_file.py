"""Open files: reads from them into slots, and the check that they have not changed since they were opened."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from ..errors import ReadError, UsageError, called
from ..machine.allocator import address_of, move, prepare_slot
from ..sizes import BLOCK, PAGE, round_up
from .disk_calls import DiskCalls

BLOCKS = 16  # Number of blocks of a file that are sampled.

AHEAD = 512 << 10  # Bytes that the system may read ahead.


@dataclass(eq=False)
class OpenFile:
    """An open file with descriptors that read through the page cache (``cached``) and around it (``direct``).

    Attributes:
        watched: whether checks raise an error if the file was written to. False for Outcore's own files.
        read: whether bytes were read from the file since the last check.
        was: its status at opening; ``blocks``: a hash of a sample of its blocks then.
    """

    path: Path
    calls: DiskCalls
    cached: int
    direct: int | None
    watched: bool = True
    read: bool = False
    was: os.stat_result = field(init=False, repr=False)
    blocks: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.was = os.fstat(self.cached)
        self.blocks = self.sampled() if self.watched else 0

    def sampled(self) -> int:
        digest, size = xxhash.xxh3_64(), self.was.st_size
        for n in range(BLOCKS):
            at = n * max(0, size - BLOCK) // (BLOCKS - 1)
            digest.update(self.calls.pread(self.cached, BLOCK, at))
            # Also drop what the system read ahead: direct readers want nothing in the page cache.
            self.calls.forget(self.cached, at - at % AHEAD, 2 * AHEAD)
        return digest.intdigest()

    def close(self) -> None:
        opened, self.cached, self.direct = (self.cached, self.direct), -1, None
        for fd in opened:
            if fd is not None and fd >= 0:
                self.calls.close(fd)


def open_file(path: Path, io: str, calls: DiskCalls) -> OpenFile:
    """Open a file; ``io`` as in ``FileReader``."""
    try:
        fd = calls.open_cached(path)
    except OSError as e:
        raise ReadError(f"{path}: cannot be opened: {e.strerror}") from e
    try:
        opened = OpenFile(path, calls, fd, None)
    except OSError as e:
        calls.close(fd)
        raise ReadError(f"{path}: cannot be read: {e.strerror}") from e
    if io == "random":
        calls.expect_random(fd)
    opened.direct = calls.open_direct(path) if io in ("auto", "direct") else None
    if opened.direct is None and io == "direct":
        opened.close()
        raise UsageError(f"{path}: this file system refuses direct reads; use {called('io')} auto or cached")
    return opened


# Errors of the disk or the file. All others may come from the memory that the read writes to.
_DISK_ERRORS = {errno.EIO, errno.ESTALE, errno.EBADF}

PASSING_ERRORS = {errno.ENOMEM, errno.EAGAIN, errno.EINTR}  # With these, the same read may succeed later.

Move = Callable[[memoryview, memoryview], None]


@dataclass(frozen=True, eq=False)
class Chunk:
    """A range of a file and where it goes in a slot.

    Attributes:
        at: first byte in ``slot``.
        aligned: memory address and file offset agree modulo ``BLOCK``, and no other data shares the range's outer
            blocks.
    """

    file: OpenFile
    offset: int
    nbytes: int
    slot: memoryview
    at: int
    aligned: bool


class ShortRead(Exception):
    def __init__(self, missing: int) -> None:
        self.missing = missing


class Bounce:
    """A thread's own buffer for direct reads, allocated on first use and backed by huge pages."""

    def __init__(self) -> None:
        self._view = memoryview(b"")

    def take(self, nbytes: int) -> memoryview:
        if len(self._view) < nbytes:
            size = round_up(nbytes, PAGE)
            # Private memory: by default the kernel gives shared mappings no huge pages.
            view = memoryview(mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
            start = -address_of(view) % PAGE
            prepare_slot(address_of(view) + start, size, "cpu")
            self._view = view[start : start + size]
        return self._view[:nbytes]


def read_chunk(chunk: Chunk, bounce: Bounce, calls: DiskCalls, to: Move, bounces: bool) -> tuple[int, bool]:
    """Read one chunk.

    Args:
        to: copies bytes from a buffer to the slot.
        bounces: do not try to read into the slot, since an earlier such read was refused; read into ``bounce``.

    Returns:
        Bytes read from the file, and whether the slot's memory refused the read.
    """
    file, start, end = chunk.file, chunk.offset, chunk.offset + chunk.nbytes
    place = chunk.slot[chunk.at : chunk.at + chunk.nbytes]
    if file.direct is None:
        buffer = place if to is move else bounce.take(chunk.nbytes)
        done = fill(calls, file.cached, buffer, start, chunk.nbytes)
        if to is not move:
            to(place, buffer)
        return done, False
    first = start - start % BLOCK
    refused: int | None = None
    if chunk.aligned and not bounces:
        blocks = chunk.slot[chunk.at - chunk.at % BLOCK : round_up(chunk.at + chunk.nbytes, BLOCK)]
        try:
            return fill(calls, file.direct, blocks, first, end - first, step=BLOCK), False
        except OSError as e:
            # This may be a GPU's memory: xnu fails with EFAULT if it cannot wire it (cluster_io_type, vfs_cluster.c).
            if e.errno in _DISK_ERRORS:
                raise
            refused = e.errno or 0
    buffer = bounce.take(round_up(end, BLOCK) - first)
    done = fill(calls, file.direct, buffer, first, end - first, step=BLOCK)
    to(place, buffer[start - first : end - first])
    # The same read into other memory succeeded, so the slot's memory was the cause.
    return done, refused is not None and refused not in PASSING_ERRORS


def fill(calls: DiskCalls, fd: int, target: memoryview, offset: int, need: int, step: int = 1) -> int:
    """Read at least ``need`` bytes, or raise ``ShortRead`` if the file ends before: a call reads 0 bytes, or a number
    that is not a multiple of ``step``, only at the end of the file."""
    done = 0
    while done < need:
        n = calls.preadv(fd, target[done:], offset + done)
        done += n
        if done < need and (n <= 0 or n % step):
            raise ShortRead(need - done)
    return done
