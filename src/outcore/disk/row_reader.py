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
from .replica import Replicas

ROW_THREADS = 8
"""Rows read at once, where a prompt asks for many."""


class RowReader:
    """Reads single rows of tensors, wherever they lie, through the page cache: rows that come often stay in it.

    Args:
        replicas: folders that have some of these files as well, where rows are read that the first cannot read: so few
            bytes take no longer from one disk than from several.

    Raises:
        ReadError: a file cannot be opened.
    """

    def __init__(self, files: Sequence[Path], metrics: Metrics | None = None, replicas: Replicas | None = None) -> None:
        self.metrics = metrics or Metrics()
        self._calls = disk_calls.system()
        self._files: dict[Path, OpenFile] = {}
        self._replicas = replicas
        self._copies: dict[tuple[int, Path], OpenFile] = {}
        self._pool = ThreadPoolExecutor(ROW_THREADS, thread_name_prefix="outcore-rows")
        try:
            for path in dict.fromkeys(files):
                self._open(path)
        except BaseException:
            self.close()
            raise

    def _open(self, path: Path) -> None:
        mirrors = enumerate(self._replicas.mirrors, start=1) if self._replicas is not None else ()
        for n, mirror in mirrors:
            copy = mirror.copy_of(path)
            if copy is None or mirror.lost is not None:
                continue
            try:
                self._copies[n, path] = opened = open_file(copy, "cached", self._calls)
                self._calls.expect_random(opened.cached)
                if mirror.changed(copy):
                    raise ReadError(f"{copy}: was written to")
            except ReadError as e:
                self._lose(n, str(e))
        try:
            self._files[path] = opened = open_file(path, "cached", self._calls)
            self._calls.expect_random(opened.cached)
        except ReadError as e:
            if not any(p == path for _, p in self._copies):
                raise
            self._lose(0, str(e))

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

    def _read(self, path: Path, offset: int, target: memoryview, what: str) -> None:
        """Read one row from whoever has it; lost ones last."""
        holders = self._holders(path)
        for at, (n, file) in enumerate(holders):
            try:
                fill(self._calls, file.cached, target, offset, len(target))
                if self._copies and file.stamp is not None:
                    file.stamp.check()
                return
            except (OSError, ShortRead, ReadError) as e:
                error = e
                why = e.strerror if isinstance(e, OSError) else "the file ended early; it changed"
                failed = e if isinstance(e, ReadError) else ReadError(f"{file.path}: reading {what} failed: {why}")
            if at + 1 == len(holders):
                raise failed from error
            self._lose(n, str(failed))

    def _holders(self, path: Path) -> list[tuple[int, OpenFile]]:
        """Whoever has the file, in order of preference."""
        files = [(0, self._files[path])] if path in self._files else []
        files += [(n, file) for (n, p), file in self._copies.items() if p == path]
        replicas = self._replicas
        return files if replicas is None else sorted(files, key=lambda f: replicas.all[f[0]].lost is not None)

    def _lose(self, n: int, why: str) -> None:
        if self._replicas is not None:
            self._replicas.lose(n, why)

    def check(self) -> None:
        """Raise ``ReadError`` if a file was written to since it was opened."""
        for (n, path), file in [*(((0, p), f) for p, f in self._files.items()), *self._copies.items()]:
            if file.stamp is None:
                continue
            try:
                file.stamp.check()
            except (ReadError, OSError) as e:
                if not any(m != n for m, _ in self._holders(path) if not self._lost(m)):
                    raise
                self._lose(n, str(e))  # rows were looked at as they were read

    def _lost(self, n: int) -> bool:
        return self._replicas is not None and self._replicas.all[n].lost is not None

    def close(self) -> None:
        """End the threads and close the files. Safe to call twice."""
        self._pool.shutdown()
        for file in [*self._files.values(), *self._copies.values()]:
            self._calls.close(file.cached)
        self._files.clear()
        self._copies.clear()
