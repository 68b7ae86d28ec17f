"""The system calls that files are read and written with: of Linux, of macOS, or a test's own.

Everything else asks ``system`` for them, so that ``using`` puts others in their place for the whole process: a test
runs the reader and the calibration on a macOS that is not there.

What is said of macOS was read in xnu's source (11417.101.15, bsd/ and osfmk/) and has not been measured.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from ..sizes import BLOCK

F_RDAHEAD, F_NOCACHE = 45, 48
"""macOS <sys/fcntl.h>; Python's module has the second there only, and the first nowhere."""


class DiskCalls:
    """What the reader, the calibration and the writers of files ask of the system: Linux's, with ``O_DIRECT`` and
    ``posix_fadvise``.

    Attributes:
        cache_first: direct reads bring what the page cache holds from there, so a disk is measured by a new file.
        lanes: reads in flight that a calibration tries beside its usual ones.
    """

    cache_first = False
    lanes: tuple[int, ...] = ()

    def open(self, path: Path, flags: int = 0) -> int:
        """A descriptor to read with, as it comes. Raises ``OSError``."""
        return os.open(path, os.O_RDONLY | flags | getattr(os, "O_CLOEXEC", 0))

    def open_cached(self, path: Path) -> int:
        """A descriptor that reads through the page cache. Raises ``OSError``."""
        return self.open(path)

    def open_direct(self, path: Path) -> int | None:
        """A descriptor that reads around the page cache where offset, length and address are whole blocks
        (``layout.BLOCK``); None where the file system refuses."""
        flag = getattr(os, "O_DIRECT", 0)
        if not flag:
            return None
        try:
            fd = self.open(path, flag)
        except OSError:
            return None
        # Some file systems accept the flag and refuse the read.
        with mmap.mmap(-1, BLOCK) as probe, memoryview(probe) as view:
            try:
                self.preadv(fd, view, 0)
            except OSError:
                self.close(fd)
                return None
        return fd

    def close(self, fd: int) -> None:
        """Close a descriptor."""
        os.close(fd)

    def preadv(self, fd: int, target: memoryview, offset: int) -> int:
        """Read into ``target`` from byte ``offset`` of the file on; bytes read, 0 at its end. Raises ``OSError``."""
        return os.preadv(fd, [target], offset)

    def pread(self, fd: int, nbytes: int, offset: int) -> bytes:
        """So many bytes, or fewer at the end of the file. Raises ``OSError``."""
        return os.pread(fd, nbytes, offset)

    def write(self, fd: int, data: memoryview) -> int:
        """Write at the descriptor's place; bytes written. Raises ``OSError``."""
        return os.write(fd, data)

    def fsync(self, fd: int) -> None:
        """Wait until what was written is on the disk. Raises ``OSError``."""
        os.fsync(fd)

    def around_cache(self, fd: int) -> bool:
        """Ask that nothing read or written by this descriptor stays in the page cache; whether that is known here.
        (Linux's flag is open(2)'s, and asks for whole blocks of those who write.)"""
        return False

    def forget(self, fd: int, offset: int, nbytes: int) -> None:
        """Ask that a range of the file is dropped from the page cache. Advice only."""
        with contextlib.suppress(OSError):
            os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)

    def expect_random(self, fd: int) -> None:
        """Advise that nothing be read ahead."""
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)


class DarwinCalls(DiskCalls):
    """``F_NOCACHE``, a flag of the open file (``fg_flag``, kern_descrip.c).

    It is direct for whole blocks only. ``cluster_read_direct`` (vfs_cluster.c) sends a request whose file offset or
    address is off the device's block size through the page cache as a whole (``cluster_read_copy``, which reads
    nothing ahead then, and drops the pages again), and so the rest behind the last page of one that ends off a block.
    Pages that the cache holds already are always taken from there (``cluster_copy_ubc_data_internal``).
    """

    cache_first = True
    lanes = (12,)
    """Published for Apple silicon: 12 reads of 8 to 19 MB at once were faster than 32."""

    def open_cached(self, path: Path) -> int:
        fd = self.open(path)
        # Who opens /dev/fd/N, as a calibration does, is given N's own open file (dupfdopen, kern_descrip.c), flags and
        # all: by itself, a new one has none.
        with contextlib.suppress(OSError):
            self.fcntl(fd, F_NOCACHE, 0)
        return fd

    def open_direct(self, path: Path) -> int | None:
        try:
            fd = self.open(path)
        except OSError:
            return None
        if self.around_cache(fd):
            return fd
        self.close(fd)
        return None

    def around_cache(self, fd: int) -> bool:
        try:
            self.fcntl(fd, F_NOCACHE, 1)
        except OSError:
            return False
        return True

    def forget(self, fd: int, offset: int, nbytes: int) -> None:
        """There is no such call: what must be read from the disk is to be written around the cache first."""

    def expect_random(self, fd: int) -> None:
        with contextlib.suppress(OSError):
            self.fcntl(fd, F_RDAHEAD, 0)

    def fcntl(self, fd: int, command: int, argument: int) -> None:
        fcntl.fcntl(fd, command, argument)


_current: DiskCalls = DarwinCalls() if sys.platform == "darwin" else DiskCalls()


def system() -> DiskCalls:
    """The calls to use now."""
    return _current


@contextlib.contextmanager
def using(calls: DiskCalls) -> Iterator[None]:
    """Have these used instead by whatever is opened while the block runs. Readers keep those that they began with."""
    global _current
    before, _current = _current, calls
    try:
        yield
    finally:
        _current = before
