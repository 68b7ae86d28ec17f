"""Runs the points of a grid, each in a process of its own, and keeps each in a file; goes on where it stopped."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from outcore.checkpoint.checkpoint import open_checkpoint
from outcore.disk.reader import FileReader
from outcore.errors import OutcoreError, UsageError
from outcore.machine.memory import last_resort

from . import fingerprint
from .disk import DiskRate
from .document import BenchRow, Document, DocumentError
from .jobs import BenchJob, RunSettings
from .matrix import Grid, GridPoint, cells_of, choose_budgets, differences, in_order, is_run, job_of
from .matrix_summary import SUMMARY, GridSummary, budgets_chosen
from .processes import measure_disk, measure_row
from .runner import Progress, open_and_plan, vocabulary
from .words import IO

DISK_EVERY_S = 60.0
"""Seconds after which the disk is measured anew before a run: its rate drifts."""
AXES = ("memory", "io", "slots", "threads")
"""Settings in which the runs of one folder differ."""


class MatrixRunner:
    """One run of ``outcore matrix``.

    Args:
        folder: of the model; ``name``: what documents call it.
        settings: what every run has in common.
        output: folder of the results; made when needed.
        overwrite: throw away what an earlier matrix left there.
        row, disk: measure a job, and what the disk gives; each in a process of its own.

    Raises:
        CheckpointError, UsageError, BudgetError: the model or the settings cannot be used, or ``output`` holds runs of
            another model, machine or settings.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        grid: Grid,
        settings: RunSettings,
        output: Path,
        command: str,
        *,
        overwrite: bool = False,
        progress: Progress = lambda *_: None,
        row: Callable[[BenchJob, Sequence[Path]], BenchRow] = measure_row,
        disk: Callable[[Sequence[Path], bool], DiskRate | None] = measure_disk,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder, self.name, self.settings, self.output = folder, name, settings, output
        self.progress, self._row, self._disk, self.clock = progress, row, disk, clock
        checkpoint = open_checkpoint(folder)
        self.files = checkpoint.files
        self.identity = checkpoint.identity()
        options: dict[str, Any] = {
            "context": settings.context,
            "prompt": settings.prompt_tokens,
            "dtype": settings.dtype,
            "cpu_streams": settings.cpu_streams,
        }
        grid = replace(grid, io=self._ways(grid.io))
        prepared = {io: open_and_plan(folder, io=io, **options)[0] for io in grid.io or ()}
        sizes = {io: p.profile.size for io, p in prepared.items()}
        opened = next(iter(prepared.values()))
        self.vocabulary = vocabulary(opened)
        self._rates: dict[bool, tuple[float, dict[str, Any]]] = {}  # by warm: when, and what
        self.blank = Document(
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            command=command,
            machine=fingerprint.machine(folder),
            model=fingerprint.describe(name, opened),
            settings=self._settings(),
            disk={"measurements": []},
        )
        chosen = grid.memory is None
        if grid.memory is None:
            # Budgets that were chosen here earlier are gone on with: what is free now may differ.
            memory = None if overwrite else budgets_chosen(output / SUMMARY)
            size = min(sizes.values(), key=lambda s: max(layer.slot for layer in s.layers))
            grid = replace(grid, memory=memory or choose_budgets(size, min(grid.slots), last_resort()))
        cells = cells_of(grid, sizes)
        if overwrite:
            self._clear()
        before = self._runs_before()
        cells = [replace(c, row=self._reusable(c.point, before)) for c in cells]
        self.reused = sum(c.row is not None for c in cells)
        self.summary = GridSummary(self.blank, grid, chosen, cells)

    def run(self) -> GridSummary:
        """Measure every point that is not there yet."""
        left = in_order([c.point for c in self.summary.cells if c.state == "missing"])
        self._summarize()
        for i, point in enumerate(left):
            self.progress(point.label, self.reused + i, self.reused + len(left))
            row = self._measure(point)
            self.summary.cells = [replace(c, row=row) if c.point == point else c for c in self.summary.cells]
            self._summarize()
        return self.summary

    def _write(self, name: str, record: dict[str, Any]) -> None:
        """Put a file into the folder of results.

        Raises:
            OutcoreError: it cannot be written.
        """
        try:
            self.output.mkdir(parents=True, exist_ok=True)
            part = self.output / f".{name}.{os.getpid()}"  # renamed when it is whole
            try:
                part.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
                part.replace(self.output / name)
            finally:
                part.unlink(missing_ok=True)
        except OSError as e:
            raise OutcoreError(f"{self.output / name}: cannot be written: {e.strerror or e}") from e

    def _ways(self, asked: tuple[str, ...] | None) -> tuple[str, ...]:
        """The ways of reading: those asked for, else those that this file system allows."""
        if asked is not None and "direct" not in asked:
            return asked
        try:
            FileReader(self.files[:1], io="direct", threads=1).close()
        except UsageError:
            if asked is not None:
                raise
            return ("cached",)
        return asked or IO

    def _settings(self, point: GridPoint | None = None) -> dict[str, Any]:
        """What runs have in common, and what one has of its own."""
        common = asdict(self.settings) | {"memory": [], "io": [], "identity": self.identity}
        if point is None:
            return common
        job = job_of(point, self.settings, "", self.vocabulary)
        return common | asdict(job.run) | {"memory": [job.memory], "io": [job.io]}

    def _measure(self, point: GridPoint) -> BenchRow:
        job = job_of(point, self.settings, str(self.folder), self.vocabulary)
        disk = None if point.resident else self._rate(job.run.cache == "warm" and point.io == "cached")
        row = self._row(job, self.files)
        row.command = job.command(self.name)
        document = replace(
            self.blank,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            command=row.command,
            settings=self._settings(point),
            rows=[row],
        )
        if disk is not None:
            row.reading.disk_gbps = disk["best_gbps"]
            document.disk = {"measurements": [disk], "warm_gbps" if disk["warm"] else "gbps": disk["best_gbps"]}
        self._write(point.file, document.record())
        return row

    def _rate(self, warm: bool) -> dict[str, Any] | None:
        """What the disk gave last, measured now if that was long ago."""
        last = self._rates.get(warm)
        if last is None or self.clock() - last[0] > DISK_EVERY_S:
            rate = self._disk(self.files, warm)
            if rate is None:
                return None
            last = self._rates[warm] = (self.clock(), asdict(rate) | {"warm": warm, "before_row": 0})
        when, measured = last
        return measured | {"age_s": round(self.clock() - when, 1)}

    def _runs_before(self) -> dict[str, Document]:
        """The runs that are there, by the names of their files; broken ones are left out, and so measured again.

        Raises:
            UsageError: one is of another model or machine, or was measured with other settings.
        """
        names = [f.name for f in self.output.iterdir() if is_run(f.name)] if self.output.is_dir() else []
        found = {}
        for name in sorted(names):
            try:
                document = Document.read(self.output / name)
            except DocumentError:
                continue
            own = {axis: document.settings.get(axis) for axis in AXES}
            self._refuse_other(name, document, self.blank.settings | own)
            found[name] = document
        return found

    def _refuse_other(self, name: str, document: Document, settings: dict[str, Any]) -> None:
        found = differences(document, replace(self.blank, settings=settings))
        if found:
            more = f"; {len(found) - 3} more" if len(found) > 3 else ""
            raise UsageError(
                f"{self.output / name} is another measurement ({'; '.join(found[:3])}{more}): give another folder with "
                "--output, or --overwrite to measure all again"
            )

    def _reusable(self, point: GridPoint, before: dict[str, Document]) -> BenchRow | None:
        """The row of an earlier run of this point; None if there is none, or it failed."""
        document = before.get(point.file)
        if document is None:
            return None
        self._refuse_other(point.file, document, self._settings(point))
        return document.rows[0] if len(document.rows) == 1 and document.rows[0].error is None else None

    def _clear(self) -> None:
        """Take away what an earlier matrix left, so that it is not mixed with this one if this is cut off."""
        if self.output.is_dir():
            for file in self.output.iterdir():
                if is_run(file.name) or file.name == SUMMARY:
                    file.unlink()

    def _summarize(self) -> None:
        self._write(SUMMARY, self.summary.record())
