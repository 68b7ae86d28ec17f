"""Files that are open to be read, around the page cache where that is wanted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..errors import ReadError, UsageError
from .disk_calls import DiskCalls
from .file_stamp import Stamp


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
