"""Open files, and the check that they have not changed since."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from ..errors import ReadError, UsageError, called
from .disk_calls import DiskCalls

BLOCKS, BLOCK = 16, 4096  # Number of blocks of a file that are sampled, and bytes of each.

AHEAD = 512 << 10  # Bytes that the system may read ahead.


@dataclass(eq=False)
class OpenFile:
    """An open file with descriptors that read through the page cache (``cached``) and around it (``direct``).

    Attributes:
        watched: raise an error if the file is written to. False for Outcore's own files.
        read: whether something was read since the last check.
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
        """Check the file if something was read from it since the last check."""
        if not self.read:
            return
        self.read = False  # before the look: a read in the meantime causes another check
        try:
            self.look()
        except (ReadError, OSError):
            self.read = True
            raise

    def look(self) -> None:
        """Compare the file's size and times with those at opening.

        A copy that preserves times restores the content's time, but never the status's (``st_ctime``). That one also
        changes without a write, with the file's links, mode or owner; then a sample of blocks is compared.

        Raises:
            ReadError: the file was written to.
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
        digest, size = xxhash.xxh3_64(), self._was.st_size
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


def _status(found: os.stat_result) -> tuple[int, ...]:
    return found.st_nlink, found.st_mode, found.st_uid, found.st_gid


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


def state_of(file: Path) -> tuple[int, ...]:
    """Return device, inode, size and modification time of a file, to see whether it changes; empty if there is none."""
    try:
        found = file.stat()
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
