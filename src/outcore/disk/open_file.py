"""Files that are open to be read, and whether they are still what they were."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from ..errors import ReadError, UsageError
from .disk_calls import DiskCalls

BLOCKS, BLOCK = 16, 4096
"""How many blocks of a file are sampled, and bytes of each."""

AHEAD = 512 << 10
"""Bytes that the system may read ahead."""


@dataclass
class Stamp:
    """What tells that an open file was written to: its size and its times.

    Who copies a file with its times sets the one of its content back, but never the one of its status (``st_ctime``).
    That one moves without a write too, with the file's names, its mode or its owner. Then some blocks are looked at.

    Args:
        fd: an open descriptor, which stays the caller's. ``calls``: what it was opened with.
    """

    path: Path
    fd: int
    calls: DiskCalls
    _was: os.stat_result = field(init=False, repr=False)
    _blocks: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._was = os.fstat(self.fd)
        self._blocks = self._sampled()

    def check(self) -> None:
        """Look at it.

        Raises:
            ReadError: it was written to.
        """
        now, was = os.fstat(self.fd), self._was
        if now.st_ctime_ns == was.st_ctime_ns and now.st_mtime_ns == was.st_mtime_ns and now.st_size == was.st_size:
            return
        content = (now.st_size, now.st_mtime_ns) != (was.st_size, was.st_mtime_ns)
        if content or _status(now) == _status(was) or self._sampled() != self._blocks:
            raise ReadError(
                f"{self.path}: was written to while the model ran; what it answered last may be wrong: load it again"
            )
        self._was = now

    def _sampled(self) -> int:
        """A digest of blocks spread over the file."""
        digest, size = xxhash.xxh3_64(), self._was.st_size
        for n in range(BLOCKS):
            at = n * max(0, size - BLOCK) // (BLOCKS - 1)
            digest.update(self.calls.pread(self.fd, BLOCK, at))
            # With what was read ahead of it: who reads around the page cache wants nothing there.
            self.calls.forget(self.fd, at - at % AHEAD, 2 * AHEAD)
        return digest.intdigest()


def _status(found: os.stat_result) -> tuple[int, ...]:
    return found.st_nlink, found.st_mode, found.st_uid, found.st_gid


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

    def check(self) -> None:
        """Look at the file, if something was read from it since the last look.

        Raises:
            ReadError, OSError: it was written to since it was opened, or cannot be looked at.
        """
        if self.stamp is None or not self.read:
            return
        self.read = False  # before it is looked at: what is read meanwhile is looked at the next time
        try:
            self.stamp.check()
        except (ReadError, OSError):
            self.read = True
            raise

    def close(self, calls: DiskCalls) -> None:
        """Close its descriptors. Safe to call twice."""
        opened, self.cached, self.direct = (self.cached, self.direct), -1, None
        for fd in opened:
            if fd is not None and fd >= 0:
                calls.close(fd)


def open_file(path: Path, io: str, calls: DiskCalls) -> OpenFile:
    """Open a file; ``io`` as in ``FileReader``.

    Raises:
        ReadError: it cannot be opened.
        UsageError: ``io="direct"`` on a file system without direct reads.
    """
    try:
        fd = calls.open_cached(path)
    except OSError as e:
        raise ReadError(f"{path}: cannot be opened: {e.strerror}") from e
    try:
        stamp = Stamp(path, fd, calls)
    except OSError as e:
        calls.close(fd)
        raise ReadError(f"{path}: cannot be read: {e.strerror}") from e
    direct = calls.open_direct(path) if io != "cached" else None
    if direct is None and io == "direct":
        calls.close(fd)
        raise UsageError(f"{path}: this file system refuses direct reads; use --io auto or cached")
    return OpenFile(path, stamp, fd, direct)


def state_of(file: Path) -> tuple[int, ...]:
    """What tells a file from what it was a moment ago; of one that is not there, nothing."""
    try:
        found = file.stat()
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
