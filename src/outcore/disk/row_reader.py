"""Single rows of tensors, read for the tokens at hand; beside `reader`, which reads whole units."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .layout import Extent
from .metrics import Metrics
from .reader import FileReader

ROW_THREADS = 8
"""Rows read at once, where a prompt asks for many."""


class RowReader:
    """Reads single rows of tensors, wherever they lie, through the page cache: rows that come often stay in it.

    Args:
        make: what makes the reader.

    Raises:
        ReadError: a file cannot be opened.
    """

    def __init__(
        self, files: Sequence[Path], metrics: Metrics | None = None, make: Callable[..., Any] = FileReader
    ) -> None:
        self.metrics = metrics or Metrics()
        self._reader: FileReader = make(files, io="random", threads=ROW_THREADS)

    def read(
        self, path: Path, offset: int, nbytes: int, rows: Sequence[int], name: str
    ) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
        """Rows of ``nbytes`` bytes each, the first of which begins at ``offset``; uint8 of shape (rows, nbytes).

        Raises:
            ReadError: the file is too short, or the disk failed.
        """
        out = np.empty((len(rows), nbytes), dtype=np.uint8)
        began = self.metrics.clock()
        extents = [Extent(path, offset + row * nbytes, nbytes, i * nbytes) for i, row in enumerate(rows)]
        read = self._reader.submit(f"rows of {name}", extents, out.reshape(-1).data)
        read.ended()
        read.wait()
        self.metrics.rows_read += len(rows)
        self.metrics.rows_s += self.metrics.clock() - began
        return out

    def check(self) -> None:
        """Raise ``ReadError`` if a file that rows were read from was written to since it was opened."""
        self._reader.check()

    def close(self) -> None:
        """End the threads and close the files. Safe to call twice."""
        self._reader.close()
