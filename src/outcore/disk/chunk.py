"""One read of a file: directly into a slot, bypassing the page cache, or through a bounce buffer."""

from __future__ import annotations

import errno
import mmap
from collections.abc import Callable
from dataclasses import dataclass

from ..machine.device_memory import address_of, move, prepare_slot
from ..sizes import BLOCK, PAGE, round_up
from .disk_calls import DiskCalls
from .open_file import OpenFile

# Errors of the disk or the file. Any other may be about the memory that the read writes to.
_DISK_ERRORS = {errno.EIO, errno.ESTALE, errno.EBADF}

PASSING_ERRORS = {errno.ENOMEM, errno.EAGAIN, errno.EINTR}  # Errors that may not occur again at the next read.

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
        bounces: an earlier read into a slot was refused, so go through the buffer at once.

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
    """Read ``need`` bytes. A read that ends off a multiple of ``step`` has met the end of the file."""
    done = 0
    while done < need:
        n = calls.preadv(fd, target[done:], offset + done)
        done += n
        if done < need and (n <= 0 or n % step):
            raise ShortRead(need - done)
    return done
