"""Whether two files hold the same bytes, from the first to the last."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from .layout import Extent
from .reader import FileReader, Read

PIECE = 8 << 20
"""Bytes of each file that are read at a time; as much again is read ahead."""


def first_difference(
    pairs: Iterable[tuple[Path, Path]], io: str = "auto", progress: Callable[[int], None] = lambda _: None
) -> tuple[Path, Path, int] | None:
    """The first byte in which two files of a pair differ, and which; None: all are the same.

    Both are read at once, around the page cache where that is possible.

    Args:
        pairs: files of the same size.
        progress: called with bytes of each side that were compared.

    Raises:
        ReadError: a file cannot be read.
    """
    buffers = [[memoryview(mmap.mmap(-1, PIECE)) for _ in range(2)] for _ in range(2)]
    done = 0
    for own, copy in pairs:
        size = own.stat().st_size
        with contextlib.closing(FileReader([own, copy], io=io)) as reader:

            def begun(at: int, own: Path = own, copy: Path = copy, size: int = size) -> list[Read]:
                n, turn = min(PIECE, size - at), at // PIECE % 2
                parts = zip((own, copy), buffers[turn], strict=True)
                return [reader.submit("compare", [Extent(file, at, n, 0, True)], to) for file, to in parts]

            under_way = begun(0) if size else []
            for at in range(0, size, PIECE):
                for read in under_way:
                    read.wait()
                under_way = begun(at + PIECE) if at + PIECE < size else []
                n = min(PIECE, size - at)
                ours, theirs = (np.frombuffer(buffer[:n], dtype=np.uint8) for buffer in buffers[at // PIECE % 2])
                if not np.array_equal(ours, theirs):
                    return own, copy, at + int(np.argmax(ours != theirs))
                done += n
                progress(done)
    return None
