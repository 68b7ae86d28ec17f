"""Files that are open to be read, and whether they are still what they were."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from ..errors import ReadError, UsageError, called
from .disk_calls import DiskCalls

BLOCKS, BLOCK = 16, 4096
"""How many blocks of a file are sampled, and bytes of each."""

AHEAD = 512 << 10
"""Bytes that the system may read ahead."""


@dataclass(eq=False)
class OpenFile:
    """A file that is open: by descriptors that read through the page cache, and around it.

    Attributes:
        calls: what it was opened with.
        watched: nobody may write to it. Else it is a file of our own.
        read: since it was last looked at, something was read from it.
    """

    path: Path
    calls: DiskCalls
    cached: int
    direct: int | None
    watched: bool = True
    read: bool = False
    _was: os.stat_result = field(init=False, repr=False)
    _blocks: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._was = os.fstat(self.cached)
        self._blocks = self._sampled() if self.watched else 0

    def check(self) -> None:
        """Look at the file, if something was read from it since the last look.

        Raises:
            ReadError, OSError: it was written to since it was opened, or cannot be looked at.
        """
        if not self.read:
            return
        self.read = False  # before it is looked at: what is read meanwhile is looked at the next time
        try:
            self.look()
        except (ReadError, OSError):
            self.read = True
            raise

    def look(self) -> None:
        """See that nobody wrote to it, by its size and its times.

        Who copies a file with its times sets the one of its content back, but never the one of its status
        (``st_ctime``). That one moves without a write too, with the file's names, its mode or its owner. Then some
        blocks are looked at.

        Raises:
            ReadError: somebody did.
        """
        now, was = os.fstat(self.cached), self._was
        times = now.st_ctime_ns == was.st_ctime_ns and now.st_mtime_ns == was.st_mtime_ns
        if not self.watched or (times and now.st_size == was.st_size):
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
            digest.update(self.calls.pread(self.cached, BLOCK, at))
            # With what was read ahead of it: who reads around the page cache wants nothing there.
            self.calls.forget(self.cached, at - at % AHEAD, 2 * AHEAD)
        return digest.intdigest()

    def close(self) -> None:
        """Close its descriptors. Safe to call twice."""
        opened, self.cached, self.direct = (self.cached, self.direct), -1, None
        for fd in opened:
            if fd is not None and fd >= 0:
                self.calls.close(fd)


def _status(found: os.stat_result) -> tuple[int, ...]:
    return found.st_nlink, found.st_mode, found.st_uid, found.st_gid


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


def state_of(file: Path) -> tuple[int, ...]:
    """What tells a file from what it was a moment ago; of one that is not there, nothing."""
    try:
        found = file.stat()
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
