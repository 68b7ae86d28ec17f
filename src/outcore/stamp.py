"""Whether an open file is still what it was."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from .errors import ReadError


@dataclass
class Stamp:
    """What tells that an open file was written to: its size and its times.

    Who copies a file with its times sets the one of its content back, but never the one of its status (``st_ctime``).
    That one moves without a write too, with the file's names, its mode or its owner: it counts where none of them did.

    Args:
        fd: an open descriptor, which stays the caller's.
    """

    path: Path
    fd: int
    _was: os.stat_result = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._was = os.fstat(self.fd)

    def check(self) -> None:
        """Look at it.

        Raises:
            ReadError: it was written to.
        """
        now, was = os.fstat(self.fd), self._was
        if now.st_ctime_ns == was.st_ctime_ns and now.st_mtime_ns == was.st_mtime_ns and now.st_size == was.st_size:
            return
        content = (now.st_size, now.st_mtime_ns) != (was.st_size, was.st_mtime_ns)
        if content or _status(now) == _status(was):
            raise ReadError(
                f"{self.path}: was written to while the model ran; what it answered last may be wrong: load it again"
            )
        self._was = now


def _status(found: os.stat_result) -> tuple[int, ...]:
    return found.st_nlink, found.st_mode, found.st_uid, found.st_gid
