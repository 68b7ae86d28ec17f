"""Small files that anyone may have written, read whole: never a pipe or a device, and never more than they may hold."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections import Counter
from pathlib import Path
from typing import Any

from ..sizes import format_size

CONFIG_BYTES = 16 << 20
"""Most bytes of a configuration; those with an entry for each quantized matrix take a few million."""

INDEX_BYTES = 100_000_000
"""Most bytes of an index of tensors: of a safetensors header too, by the reference implementation."""

TOKENIZER_BYTES = 1 << 28
"""Most bytes of any file of a tokenizer; the largest vocabularies take 35 million."""

_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | getattr(os, "O_CLOEXEC", 0)


def open_small(path: Path, most: int) -> int:
    """A descriptor of a regular file, or of one that the path links to, that seems to have at most ``most`` bytes.

    Raises:
        OSError: it cannot be opened, is no regular file, or has more; ``strerror`` says which.
    """
    # Before it is opened, because opening a device can do something; and after, because it may be another by then.
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
    """Whether somebody else's code can be let read the file; raises as ``open_small``."""
    os.close(open_small(path, most))


def read_small(path: Path, most: int) -> bytes:
    """All bytes of a file; raises as ``open_small``. One that grows meanwhile is not read beyond ``most``."""
    with open(open_small(path, most), "rb", buffering=0) as file:
        parts, left = [], most + 1
        while left and (data := file.read(min(left, 1 << 20))):
            parts.append(data)
            left -= len(data)
    if not left:
        raise _too_large(path, most)
    return b"".join(parts)


def parse_json(raw: bytes, *, twins: bool = True) -> Any:
    """What a JSON document says.

    Args:
        twins: of two equal names in one object the last counts, as everywhere; else they are refused.

    Raises:
        ValueError: it is none, is nested too deeply, or has an integer of thousands of digits.
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
