"""An unnamed file for keys and values, which disappears when the process ends, however it ends.

The file is sparse: only bytes that were written take room. A region is freed when nothing refers to it any more. Not
thread-safe, but any thread may drop a region.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
import sys
import weakref
from collections import deque
from pathlib import Path

from outcore.disk import disk_calls
from outcore.disk.open_file import OpenFile, ShortRead, fill
from outcore.errors import ClosedError, StoreError
from outcore.machine.written import wrote
from outcore.sizes import BLOCK, format_size, round_up

# ``FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE``, linux/falloc.h.
PUNCH_HOLE = 3

# Bytes of the disk that stay free for others.
MARGIN = 100_000_000


class Region:
    """``nbytes`` bytes of the file from ``offset`` on; freed with the last reference."""

    __slots__ = ("__weakref__", "nbytes", "offset")

    def __init__(self, offset: int, nbytes: int) -> None:
        self.offset, self.nbytes = offset, nbytes


def try_folder(folder: Path) -> None:
    """Raises StoreError if a folder cannot hold keys and values; tries it with a file that it removes again."""
    scratch = Scratch(folder)
    scratch.close()
    if scratch.made:
        with contextlib.suppress(OSError):
            scratch.folder.rmdir()


class Scratch:
    """A file in ``folder`` that is unlinked before anything is written. Creates the folder if its parent exists.

    Attributes:
        made: whether the folder was created.

    Raises:
        StoreError: the file cannot be made or, in a method, written or read.
    """

    def __init__(self, folder: Path, io: str = "auto") -> None:
        with contextlib.suppress(RuntimeError):  # no user of the name in "~name": the folder may have that name
            folder = folder.expanduser()
        self.folder = folder
        self._calls = disk_calls.system()
        self._end = 0
        self._free: dict[int, list[int]] = {}
        self._held: dict[weakref.ref[Region], tuple[int, int]] = {}  # offset and bytes
        # ``deque.append`` is the callback because it runs no Python code, in which a Ctrl-C could get lost.
        self._gone: deque[weakref.ref[Region]] = deque()
        try:
            self.made = not folder.is_dir()
            folder.mkdir(mode=0o700, exist_ok=True)
            path = folder / f".outcore-kv-{os.getpid()}-{secrets.token_hex(8)}"
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as e:
            why = "it is not a folder" if e.errno == errno.EEXIST else e.strerror
            if not folder.parent.is_dir():
                why = f"there is no folder {folder.parent} to make it in; make that"
            raise StoreError(
                f"{folder}: keys and values cannot be stored there: {why}; set another folder (OUTCORE_CACHE or kv_dir)"
            ) from e
        try:
            cached = self._calls.open_cached(path)
            direct = self._calls.open_direct(path) if io != "cached" else None
            self.file = OpenFile(path, self._calls, cached, direct, watched=False)
        except OSError as e:
            os.close(self._fd)
            raise StoreError(f"{path}: cannot be read again: {e.strerror}") from e
        finally:
            with contextlib.suppress(OSError):
                path.unlink()
        # Written data should not stay in the page cache (macOS sets this for each file).
        self._calls.around_cache(self._fd)
        self._closed = False

    @property
    def free_bytes(self) -> int:
        stats = os.fstatvfs(self._fd)
        return max(0, stats.f_bavail * stats.f_frsize - MARGIN)

    def take(self, nbytes: int) -> Region:
        self.tidy()
        nbytes = round_up(nbytes, BLOCK)
        if self._free.get(nbytes):
            offset = self._free[nbytes].pop()
        else:
            offset, end = self._end, self._end + nbytes
            try:
                os.ftruncate(self._fd, end)
            except OSError as e:
                raise self._failed(e, nbytes) from e
            self._end = end
        region = Region(offset, nbytes)
        self._held[weakref.ref(region, self._gone.append)] = offset, nbytes
        return region

    def tidy(self) -> None:
        """Frees the regions to which nothing refers any more."""
        while self._gone and not self._closed:
            offset, nbytes = self._held.pop(self._gone.popleft())
            self._free.setdefault(nbytes, []).append(offset)
            if sys.platform == "linux":
                # File systems that cannot punch holes free the space when the file is closed.
                with contextlib.suppress(AttributeError):
                    call = ctypes.CDLL(None).fallocate
                    call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
                    call(self._fd, PUNCH_HOLE, offset, nbytes)

    def write(self, offset: int, data: memoryview) -> None:
        done = 0
        self._check_open()
        try:
            while done < len(data):
                done += os.pwrite(self._fd, data[done:], offset + done)
            wrote("contexts", done)
        except OSError as e:
            raise self._failed(e, len(data)) from e
        self._calls.forget(self._fd, offset, len(data))

    def read(self, offset: int, target: memoryview) -> None:
        self._check_open()
        try:
            fill(self._calls, self._fd, target, offset, len(target))
        except (OSError, ShortRead) as e:
            why = e.strerror if isinstance(e, OSError) else "it ended early"
            raise StoreError(f"{self.folder}: keys and values could not be read: {why}") from e

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            os.close(self._fd)
            self.file.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this model was closed, which deleted its caches on disk; load it again")

    def _failed(self, e: OSError, nbytes: int) -> StoreError:
        advice = "free some, or name another folder (OUTCORE_CACHE, or kv_dir)"
        return StoreError(
            f"{self.folder}: {format_size(nbytes)} of keys and values could not be written: {e.strerror}; {advice}"
        )
