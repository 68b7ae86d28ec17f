"""One read of a file: around the page cache straight into a slot, or by way of a buffer."""

from __future__ import annotations

import errno
import mmap
from collections.abc import Callable
from dataclasses import dataclass

from ..machine.device_memory import address_of, move, prepare_slot
from ..sizes import BLOCK, PAGE, round_up
from .disk_calls import DiskCalls
from .open_file import OpenFile

_DISK_ERRORS = {errno.EIO, errno.ESTALE, errno.EBADF}
"""What a read fails with wherever it goes: anything else may be about the memory that it should go to."""

PASSING_ERRORS = {errno.ENOMEM, errno.EAGAIN, errno.EINTR}
"""What says nothing about the next read."""

Move = Callable[[memoryview, memoryview], None]


@dataclass(frozen=True, eq=False)
class Chunk:
    """A range of a file, and where it goes.

    Attributes:
        at: byte of ``slot`` that it begins at.
        aligned: address and offset agree modulo ``BLOCK``, and nothing else lies in the blocks around it.
    """

    file: OpenFile
    offset: int
    nbytes: int
    slot: memoryview
    at: int
    aligned: bool


class ShortRead(Exception):
    """A file ended before a read did."""

    def __init__(self, missing: int) -> None:
        self.missing = missing


class Bounce:
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


def read_chunk(chunk: Chunk, bounce: Bounce, calls: DiskCalls, to: Move, bounces: bool) -> tuple[int, bool]:
    """Read one chunk.

    Args:
        to: brings bytes to the slot from a buffer. ``bounces``: slots' memory is known to refuse reads.

    Returns:
        Bytes read from the file, and whether the slot's memory refused the read.

    Raises:
        OSError, ShortRead: that could not be.
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
            # A GPU's memory, perhaps: xnu answers EFAULT where it cannot wire it (cluster_io_type, vfs_cluster.c).
            if e.errno in _DISK_ERRORS:
                raise
            refused = e.errno or 0
    buffer = bounce.take(round_up(end, BLOCK) - first)
    done = fill(calls, file.direct, buffer, first, end - first, step=BLOCK)
    to(place, buffer[start - first : end - first])
    # If it was refused, that is the memory's fault: the same read into other memory succeeded.
    return done, refused is not None and refused not in PASSING_ERRORS


def fill(calls: DiskCalls, fd: int, target: memoryview, offset: int, need: int, step: int = 1) -> int:
    """Read until ``need`` bytes are there. A read that ends off ``step`` has met the end of the file."""
    done = 0
    while done < need:
        n = calls.preadv(fd, target[done:], offset + done)
        done += n
        if done < need and (n <= 0 or n % step):
            raise ShortRead(need - done)
    return done
