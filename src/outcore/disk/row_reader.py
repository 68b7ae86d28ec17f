"""Single rows of tensors, read for the tokens at hand; beside `reader`, which reads whole units."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from ..errors import ReadError
from . import disk_calls
from .chunk import ShortRead, fill
from .metrics import Metrics
from .open_file import OpenFile, open_file

ROW_THREADS = 8
"""Rows read at once, where a prompt asks for many."""


class RowReader:
    """Reads single rows of tensors, wherever they lie, through the page cache: rows that come often stay in it.

    Raises:
        ReadError: a file cannot be opened.
    """

    def __init__(self, files: Sequence[Path], metrics: Metrics | None = None) -> None:
        self.metrics = metrics or Metrics()
        self._calls = disk_calls.system()
        self._opened: dict[Path, OpenFile] = {}
        self._pool = ThreadPoolExecutor(ROW_THREADS, thread_name_prefix="outcore-rows")
        try:
            for path in dict.fromkeys(files):
                self._open(path)
        except BaseException:
            self.close()
            raise

    def read(
        self, path: Path, offset: int, nbytes: int, rows: Sequence[int], name: str
    ) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
        """Rows of ``nbytes`` bytes each, the first of which begins at ``offset``; uint8 of shape (rows, nbytes).

        Raises:
            ReadError: the file is too short, or the disk failed.
        """
        out = np.empty((len(rows), nbytes), dtype=np.uint8)

        def read(part: slice) -> None:
            for i in range(part.start, part.stop):
                self._read(path, offset + rows[i] * nbytes, out[i].data, f"row {rows[i]} of {name}")

        began = self.metrics.clock()
        step = max(16, -(-len(rows) // ROW_THREADS))
        parts = [slice(a, min(a + step, len(rows))) for a in range(0, len(rows), step)]
        if len(parts) == 1:
            read(parts[0])
        else:
            list(self._pool.map(read, parts))
        self.metrics.rows_read += len(rows)
        self.metrics.rows_s += self.metrics.clock() - began
        return out

    def _open(self, path: Path) -> None:
        opened = self._opened[path] = open_file(path, "cached", self._calls)
        self._calls.expect_random(opened.cached)

    def _read(self, path: Path, offset: int, target: memoryview, what: str) -> None:
        self._fill(self._opened[path], offset, target, what)

    def _fill(self, file: OpenFile, offset: int, target: memoryview, what: str) -> None:
        try:
            fill(self._calls, file.cached, target, offset, len(target))
        except (OSError, ShortRead) as e:
            why = e.strerror if isinstance(e, OSError) else "the file ended early; it changed"
            raise ReadError(f"{file.path}: reading {what} failed: {why}") from e
        file.read = True

    def check(self) -> None:
        """Raise ``ReadError`` if a file that rows were read from was written to since it was opened."""
        for file in self._opened.values():
            file.check()

    def close(self) -> None:
        """End the threads and close the files. Safe to call twice."""
        self._pool.shutdown()
        for file in self._opened.values():
            file.close(self._calls)
        self._opened.clear()
