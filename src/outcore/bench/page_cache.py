"""The system's page cache, made cold or warm for a measurement."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

PIECE = 8 << 20  # bytes


def drop_page_cache(files: Iterable[Path]) -> None:
    """Ask the kernel to forget what it has cached of these files; pages that are mapped or not yet written stay."""
    if not hasattr(os, "posix_fadvise"):  # macOS
        return
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def warm_page_cache(files: Iterable[Path]) -> None:
    """Read these files once through the page cache; what does not fit there stays cold."""
    buffer = bytearray(PIECE)
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
