"""Counts the bytes that Outcore writes to disks, by purpose, for ``outcore cache ls``."""

from __future__ import annotations

import atexit
import os
import time
from contextlib import suppress

from ..errors import OutcoreError
from .cache_folder import make_cache

# A file of the cache folder to which processes add lines: when, how many bytes, and what for.
FILE = "written.txt"

# Bytes after which a process adds a line, besides at its end: no more are lost if it is killed.
EACH = 32_000_000

_pending: dict[str, int] = {}


def wrote(purpose: str, nbytes: int) -> None:
    _pending[purpose] = _pending.get(purpose, 0) + nbytes
    if _pending[purpose] >= EACH:
        add_up()


@atexit.register
def add_up() -> None:
    """Adds what this process has written to the file, if it can."""
    with suppress(OSError, OutcoreError):
        while _pending:
            purpose, nbytes = _pending.popitem()
            with open(make_cache() / FILE, "a", opener=_opener) as file:
                file.write(f"{time.time():.0f} {nbytes} {purpose}\n")


def _opener(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)
