"""The system calls that read and write files, for Linux and macOS.

All other code gets them from ``system()``. Tests replace them for the whole process with ``using``, for example to run
the reader and the calibration against a simulated macOS. Facts about macOS come from xnu's source (11417.101.15, bsd/
and osfmk/); they were not measured.
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

F_RDAHEAD, F_NOCACHE = 45, 48  # macOS <sys/fcntl.h>. Python's fcntl has F_NOCACHE on macOS only, and F_RDAHEAD nowhere.


class DiskCalls:
    """Linux's calls, with ``O_DIRECT`` and ``posix_fadvise``. All of them may raise ``OSError``.

    Attributes:
        cache_first: whether direct reads return cached pages; if so, a calibration reads a file that it has written.
        lanes: numbers of concurrent reads that a calibration tries besides its usual ones.
    """

    cache_first = False
    lanes: tuple[int, ...] = ()

    def open(self, path: Path, flags: int = 0) -> int:
        return os.open(path, os.O_RDONLY | flags | getattr(os, "O_CLOEXEC", 0))

    def open_cached(self, path: Path) -> int:
        return self.open(path)

    def open_direct(self, path: Path) -> int | None:
        """Open a file to read around the page cache, with offset, length and address at whole blocks (``sizes.BLOCK``).

        Returns None if the file system does not support that.
        """
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
        os.close(fd)

    def preadv(self, fd: int, target: memoryview, offset: int) -> int:
        """Read into ``target`` from file position ``offset``. Returns the number of bytes read; 0 at the end of the
        file."""
        return os.preadv(fd, [target], offset)

    def pread(self, fd: int, nbytes: int, offset: int) -> bytes:
        return os.pread(fd, nbytes, offset)

    def write(self, fd: int, data: memoryview) -> int:
        return os.write(fd, data)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def around_cache(self, fd: int) -> bool:
        """Ask the system to keep what this descriptor reads and writes out of the page cache; False if it cannot.

        Linux cannot: there, only the flag ``O_DIRECT`` of open(2) does that, and then every write must be whole blocks.
        """
        return False

    def forget(self, fd: int, offset: int, nbytes: int) -> None:
        """Advise the system to drop a range of the file from the page cache."""
        with contextlib.suppress(OSError):
            os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)

    def expect_random(self, fd: int) -> None:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)


class DarwinCalls(DiskCalls):
    """macOS's calls. Direct reads use ``F_NOCACHE``, a flag of the open file (``fg_flag``, kern_descrip.c).

    macOS reads only whole blocks directly (``cluster_read_direct``, vfs_cluster.c). If file offset or address is not a
    multiple of the device's block size, the request goes through the page cache, without read-ahead, and its pages are
    dropped afterwards (``cluster_read_copy``). So do bytes after the last whole page of a request that ends inside a
    block. Pages that the cache already has are always copied from it (``cluster_copy_ubc_data_internal``).
    """

    cache_first = True
    lanes = (12,)  # Published for Apple silicon: 12 concurrent reads of 8 to 19 MB were faster than 32.

    def open_cached(self, path: Path) -> int:
        fd = self.open(path)
        # Opening /dev/fd/N, as calibration does, yields N's own open file with its flags (dupfdopen, kern_descrip.c).
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
        """Do nothing: macOS has no such call. Calibration therefore writes its file around the page cache."""

    def expect_random(self, fd: int) -> None:
        with contextlib.suppress(OSError):
            self.fcntl(fd, F_RDAHEAD, 0)

    def fcntl(self, fd: int, command: int, argument: int) -> None:
        fcntl.fcntl(fd, command, argument)


_current: DiskCalls = DarwinCalls() if sys.platform == "darwin" else DiskCalls()


def system() -> DiskCalls:
    return _current


@contextlib.contextmanager
def using(calls: DiskCalls) -> Iterator[None]:
    """Use other calls while the block runs. Readers keep the calls that they were opened with."""
    global _current
    before, _current = _current, calls
    try:
        yield
    finally:
        _current = before
