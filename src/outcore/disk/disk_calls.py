"""The system calls that files are read and written with: of Linux, of macOS, or a test's own.

Everything else asks ``system`` for them, so that ``using`` puts others in their place for the whole process: a test
runs the reader and the calibration on a macOS that is not there.

What is said of macOS was read in xnu's source (11417.101.15, bsd/ and osfmk/) and has not been measured.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from ..sizes import BLOCK

F_RDAHEAD, F_NOCACHE = 45, 48
"""macOS <sys/fcntl.h>; Python's module has the second there only, and the first nowhere."""

MAP_SHARED, PROT_NONE, MS_INVALIDATE = 1, 0, 2
"""<sys/mman.h>: the same numbers on macOS and on Linux."""

_MAP_BYTES = 1 << 34
"""Bytes that are mapped at a time at most, as fio does (os/mac/posix.c)."""


class DiskCalls:
    """What the reader, the calibration and the writers of files ask of the system: Linux's, with ``O_DIRECT`` and
    ``posix_fadvise``.

    Attributes:
        cache_first: direct reads bring what the page cache holds from there, so a measurement must forget it first.
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

    def forget(self, fd: int, offset: int, nbytes: int) -> bool:
        """Ask that a range of the file is dropped from the page cache; whether that was taken. Never raises."""
        try:
            os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)
        except OSError:
            return False
        return True

    def expect_random(self, fd: int) -> None:
        """Advise that nothing be read ahead."""
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)


class DarwinCalls(DiskCalls):
    """``F_NOCACHE``, a flag of the open file (``fg_flag``, kern_descrip.c), and ``msync``.

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

    def forget(self, fd: int, offset: int, nbytes: int) -> bool:
        # As fio does it (os/mac/posix.c, discard_pages). Unwritten pages are written by msync too (vm_map_msync in
        # vm_map.c), but a disk that is being written to is not measured.
        first, end = offset - offset % mmap.PAGESIZE, offset + nbytes
        try:
            self.fsync(fd)
            for at in range(first, end, _MAP_BYTES):
                size = min(_MAP_BYTES, end - at)
                address = self.mmap(fd, at, size)
                try:
                    self.msync(address, size, MS_INVALIDATE)
                finally:
                    self.munmap(address, size)
        except OSError:
            return False
        return True

    def expect_random(self, fd: int) -> None:
        with contextlib.suppress(OSError):
            self.fcntl(fd, F_RDAHEAD, 0)

    # What Linux has under other numbers, or Python's own modules do in another way

    def fcntl(self, fd: int, command: int, argument: int) -> None:
        fcntl.fcntl(fd, command, argument)

    def mmap(self, fd: int, offset: int, nbytes: int) -> int:
        """The address of a shared mapping that nobody may touch. Python's ``mmap`` tells no address of one that cannot
        be written to, and makes the disk write its own cache first (``F_FULLFSYNC``)."""
        call = ctypes.CDLL(None, use_errno=True).mmap
        call.restype = ctypes.c_void_p
        call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
        address = call(None, nbytes, PROT_NONE, MAP_SHARED, fd, offset)
        if address is None or address == ctypes.c_void_p(-1).value:
            raise _last_error()
        return int(address)

    def msync(self, address: int, nbytes: int, flags: int) -> None:
        if ctypes.CDLL(None, use_errno=True).msync(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), flags):
            raise _last_error()

    def munmap(self, address: int, nbytes: int) -> None:
        ctypes.CDLL(None).munmap(ctypes.c_void_p(address), ctypes.c_size_t(nbytes))


def _last_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


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
