"""A macOS for files: the calls of ``DarwinCalls`` on real files, and a page cache kept in mind as xnu keeps one.

Function names are those of xnu 11417.101.15, mostly bsd/vfs/vfs_cluster.c. Bytes are always the file's; what is kept
is where they would have come from, and how long that would have taken.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import threading
from collections.abc import Iterable
from pathlib import Path

from outcore.disk.disk_calls import F_NOCACHE, DarwinCalls
from outcore.sizes import BLOCK

PAGE = 16384
"""Bytes of a page of Apple silicon."""

File = tuple[int, int]


class Flags:
    """Of an open file (``fg_flag``), which descriptors may share."""

    nocache = False


class FakeDarwin(DarwinCalls):
    """Counts what was direct and what came from the cache, and tells the time that the disk would have taken.

    Args:
        gbps: of the disk; what comes from the cache takes none.
        takes_nocache: whether fcntl takes ``F_NOCACHE``.
        keeps: misaligned requests leave their pages in the cache. xnu's ``cluster_read_copy`` drops them again
            (``UPL_ABORT_DUMP_PAGES``), but a file system may have a way of its own.

    Attributes:
        direct, copied, hit: bytes that came from the disk into the caller's memory, from the disk through the cache,
            and from the cache, by descriptors with ``F_NOCACHE``.
        misaligned: their requests off the block size.
        uncached: files (device, inode) of all descriptors that had the flag.
        pages: of each file that the cache holds.
        refuses: ranges of addresses that a direct read into is refused with ``error``.
    """

    def __init__(self, *, gbps: float = 1.0, takes_nocache: bool = True, keeps: bool = False) -> None:
        self.gbps, self.takes_nocache, self.keeps = gbps, takes_nocache, keeps
        self.direct = self.copied = self.hit = self.misaligned = 0
        self.uncached: set[File] = set()
        self.pages: dict[File, set[int]] = {}
        self.refuses: list[range] = []
        self.error = errno.EFAULT
        self.refusals = 0
        self._flags: dict[int, Flags] = {}
        self._now = 0.0
        self._lock = threading.RLock()

    def clock(self) -> float:
        """Seconds that the disk was busy so far."""
        with self._lock:
            return self._now

    def warm(self, path: Path) -> None:
        """Have the cache hold all of the file."""
        self.pages.setdefault(_file(path), set()).update(range(-(-path.stat().st_size // PAGE)))

    def refuse(self, memory: memoryview) -> None:
        """Let no direct read into this memory succeed."""
        start = _address(memory)
        self.refuses.append(range(start, start + len(memory)))

    # The calls

    def open(self, path: Path, flags: int = 0) -> int:
        fd = super().open(path, flags)
        shared = re.fullmatch(r"/(?:proc/self|dev)/fd/(\d+)", str(path))  # dupfdopen, kern_descrip.c
        with self._lock:
            self._flags[fd] = self._flags.setdefault(int(shared[1]), Flags()) if shared else Flags()
        return fd

    def close(self, fd: int) -> None:
        with self._lock:
            self._flags.pop(fd, None)
        super().close(fd)

    def fcntl(self, fd: int, command: int, argument: int) -> None:
        if command == F_NOCACHE:
            if not self.takes_nocache:
                raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
            with self._lock:
                self._flags.setdefault(fd, Flags()).nocache = bool(argument)
                if argument:
                    self.uncached.add(_file(fd))

    def preadv(self, fd: int, target: memoryview, offset: int) -> int:
        around = self._nocache(fd)
        address = _address(target)
        if around and any(address < r.stop and r.start < address + len(target) for r in self.refuses):
            self.refusals += 1
            raise OSError(self.error, os.strerror(self.error))
        n = super().preadv(fd, target, offset)
        self._account(fd, offset, n, around, aligned=offset % BLOCK == 0 and address % BLOCK == 0)
        return n

    def pread(self, fd: int, nbytes: int, offset: int) -> bytes:
        data = super().pread(fd, nbytes, offset)
        self._account(fd, offset, len(data), self._nocache(fd), aligned=False)
        return data

    def write(self, fd: int, data: memoryview) -> int:
        offset = os.lseek(fd, 0, os.SEEK_CUR)
        n = super().write(fd, data)
        if n and not self._nocache(fd):
            with self._lock:
                written = set(range(offset // PAGE, (offset + n - 1) // PAGE + 1))
                self.pages.setdefault(_file(fd), set()).update(written)
        return n

    def _nocache(self, fd: int) -> bool:
        with self._lock:
            return self._flags[fd].nocache if fd in self._flags else False

    def _account(self, fd: int, offset: int, nbytes: int, around: bool, *, aligned: bool) -> None:
        """Where the bytes came from, page by page, as ``cluster_read_ext`` finds them."""
        end = offset + nbytes
        # Of a request that ends off a block, the part behind its last page goes through cluster_read_copy.
        direct_end = end if nbytes % BLOCK == 0 else end - nbytes % PAGE
        with self._lock:
            held = self.pages.setdefault(_file(fd), set())
            self.misaligned += around and not aligned and nbytes > 0
            for page in range(offset // PAGE, -(-end // PAGE)):
                n = min(end, (page + 1) * PAGE) - max(offset, page * PAGE)
                if page in held:  # cluster_copy_ubc_data, before anything else is tried
                    self.hit += n if around else 0
                    continue
                self._now += n / (self.gbps * 1e9)
                if not around:
                    held.add(page)
                elif aligned and page * PAGE < direct_end:
                    self.direct += n
                else:
                    self.copied += n
                    if self.keeps:
                        held.add(page)


def _file(what: int | Path) -> File:
    status = os.fstat(what) if isinstance(what, int) else what.stat()
    return status.st_dev, status.st_ino


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) if len(view) else 0


def files_of(paths: Iterable[Path]) -> set[File]:
    """Device and inode of each."""
    return {_file(path) for path in paths}
