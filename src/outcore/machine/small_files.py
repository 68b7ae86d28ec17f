"""Reads small untrusted files whole (regular files only, up to a limit), and tells files' states."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections import Counter
from pathlib import Path
from typing import Any

from ..sizes import format_size

# Most bytes of a configuration; one with an entry for each quantized matrix has a few million.
CONFIG_BYTES = 16 << 20

# Most bytes of an index of tensors, and of a safetensors header, as in the reference implementation.
INDEX_BYTES = 100_000_000

# Most bytes of a tokenizer file; those of the largest vocabularies have 35 million.
TOKENIZER_BYTES = 1 << 28

_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | getattr(os, "O_CLOEXEC", 0)


def open_small(path: Path, most: int) -> int:
    """Opens a regular file, or a link to one, of at most ``most`` bytes.

    Raises:
        OSError: it cannot be opened, is not a regular file, or is larger; ``strerror`` says which.
    """
    # Checked before opening, since opening a device can have effects, and again after, since the path may have changed.
    _require_regular(path.stat(), path)
    fd = os.open(path, _FLAGS)
    try:
        status = os.fstat(fd)
        _require_regular(status, path)
        if status.st_size > most:
            raise _too_large(path, most)
    except BaseException:
        os.close(fd)
        raise
    return fd


def check_small(path: Path, most: int) -> None:
    """Checks a file before another library reads it; raises as ``open_small``."""
    os.close(open_small(path, most))


def read_small(path: Path, most: int) -> bytes:
    """Reads a whole file, and no more than ``most`` bytes if it grows meanwhile; raises as ``open_small``."""
    with open(open_small(path, most), "rb", buffering=0) as file:
        parts, left = [], most + 1
        while left and (data := file.read(min(left, 1 << 20))):
            parts.append(data)
            left -= len(data)
    if not left:
        raise _too_large(path, most)
    return b"".join(parts)


def parse_json(raw: bytes, *, twins: bool = True) -> Any:
    """Parses a JSON document.

    Args:
        twins: whether an object may have a name twice; its last value counts.

    Raises:
        ValueError: not JSON, nested too deeply, or an integer of thousands of digits.
    """
    try:
        return json.loads(raw, object_pairs_hook=None if twins else _refuse_twins)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _refuse_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twin = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"{twin[:80]!a} twice")
    return found


def _require_regular(status: os.stat_result, path: Path) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))


def _too_large(path: Path, most: int) -> OSError:
    return OSError(errno.EFBIG, f"more than the {format_size(most)} that such a file may have", str(path))


def state_of(file: Path) -> tuple[int, ...]:
    """Return a file's device, inode, size and modification time, to compare later; empty if there is no such file."""
    try:
        found = file.stat()
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
