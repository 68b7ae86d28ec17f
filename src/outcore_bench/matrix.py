"""``outcore matrix``: the rows of a bench at every budget, way of reading, number of slots and of reads in flight.

What is measured is a bench's document, with the axes as ``settings["grid"]``. It goes on where it stopped.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from outcore.checkpoint.checkpoint import open_checkpoint
from outcore.checkpoint.identity import identity_of
from outcore.checks import choice, parse_size, whole
from outcore.decode.preparation import prepare
from outcore.disk.reader import FileReader
from outcore.errors import BudgetError, UsageError
from outcore.machine.memory import last_resort
from outcore.plan.model_size import ModelSize
from outcore.plan.planner import make_plan, resident_budget, smallest_budget
from outcore.sizes import format_size

from .document import SCHEMA, Document, DocumentError, read_record, write_record
from .jobs import BenchJob, RunSettings
from .processes import failed
from .runner import Progress, Runner, vocabulary
from .words import BUDGETS, IO, OUTCORE

SEED = 20
"""Of the order of the runs: with drift of the disk spread over all axes, and the same each time."""


@dataclass(frozen=True)
class Grid:
    """The axes. ``memory`` None: budgets are to be chosen from the model (``memory_chosen``); ``io`` None: what the
    file system allows.

    Raises:
        UsageError: a value that cannot be used.
    """

    memory: tuple[int, ...] | None = None
    io: tuple[str, ...] | None = None
    slots: tuple[int, ...] = (2, 3, 4)
    threads: tuple[int, ...] = (1, 4, 8)
    memory_chosen: bool = False

    def __post_init__(self) -> None:
        for io in self.io or ():
            choice("--io", io, IO)
        for n in self.slots:
            whole("--slots", n, 2)
        for n in self.threads:
            whole("--threads", n)
        for name, values in vars(self).items():
            if values == ():
                raise UsageError(f"--{name}: give at least one value")


class MatrixRunner:
    """One run of ``outcore matrix``.

    Args:
        folder: of the model; ``name``: what the document calls it.
        settings: what every run has in common.
        output: file of the results.
        overwrite: measure all again, whatever an earlier matrix left there.

    Attributes:
        document: what was measured, with a row with an ``error`` for each point that does not fit.
        jobs: what is still to be measured.

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
    ) -> None:
        checkpoint = open_checkpoint(folder)
        ways = _ways(checkpoint.files[0], grid.io)
        fixed: dict[str, Any] = {"context": settings.context, "prompt": settings.prompt_tokens}
        fixed |= {"dtype": settings.dtype, "cpu_streams": settings.cpu_streams}
        opened = {io: prepare(folder, least=True, io=io, **fixed) for io in ways}
        sizes = {io: prepared.profile.size for io, prepared in opened.items()}
        common = asdict(settings) | {"identity": identity_of(checkpoint)}
        self._output = output
        self._runner = Runner(folder, name, opened[ways[0]], common, command)
        self.document = self._runner.document
        before = None if overwrite or not output.exists() else _before(output, self.document)
        memory, chosen = grid.memory, grid.memory is None
        if memory is None and before is not None and before.settings["grid"]["memory_chosen"]:
            memory = tuple(before.settings["grid"]["memory"])  # what is free now may differ
        if memory is None:
            memory = choose_budgets(sizes[ways[0]], min(grid.slots), last_resort())
        grid = replace(grid, io=ways, memory=memory, memory_chosen=chosen)
        self.document.settings["grid"] = asdict(grid)
        if before is not None:
            self.document.rows = [row for row in before.rows if row.error is None]
            self.document.disk = before.disk
        self.reused = len(self.document.rows)
        known = {(row.setting.memory, row.label) for row in self.document.rows}
        job = BenchJob(OUTCORE, str(folder), "", settings, settings.context, vocabulary(opened[ways[0]]))
        self.jobs = []
        for each, unfit in jobs_of(grid, sizes, job):
            if unfit is not None:
                self.document.rows.append(failed(each, unfit))
            elif (each.memory, each.label) not in known:
                self.jobs.append(each)

    def run(self, progress: Progress = lambda *_: None) -> Document:
        """Measure every point that is not there yet."""
        self._write(self.document)
        return self._runner.run(in_order(self.jobs), progress, self._write)

    def _write(self, document: Document) -> None:
        write_record(self._output, document.record())


def jobs_of(grid: Grid, sizes: Mapping[str, ModelSize], job: BenchJob) -> list[tuple[BenchJob, str | None]]:
    """A job for every point of a grid whose budgets are known, and why it does not fit where it does not.

    A budget with which everything is resident has a single one: nothing is read, whatever the rest says.

    Args:
        sizes: the model's, by way of reading: direct reads take a little more room.
        job: what they have in common.
    """
    found: dict[str, tuple[BenchJob, str | None]] = {}
    for memory in grid.memory or ():
        shown = format_size(memory)
        whole = replace(job, memory=size_text(memory), label=f"{shown}, all resident")
        for io, size in sizes.items():
            for slots in grid.slots:
                unfit = None
                try:
                    if not make_plan(size, memory, slots=slots).streams:
                        found[whole.memory or ""] = (whole, None)
                        continue
                except BudgetError as e:
                    unfit = str(e)
                for threads in grid.threads:
                    label = f"{shown}, {io}, {slots} slots, {threads} thread{'s' * (threads > 1)}"
                    run = replace(job.run, slots=slots, threads=threads)
                    found[f"{memory} {label}"] = (replace(whole, io=io, label=label, run=run), unfit)
    return list(found.values())


def in_order(jobs: list[BenchJob]) -> list[BenchJob]:
    """The order of the runs: shuffled, so that drift of the machine is not taken for an axis; always the same."""
    return random.Random(SEED).sample(sorted(jobs, key=lambda job: (job.memory or "", job.label)), len(jobs))


def size_text(nbytes: int) -> str:
    """A size without spaces that reads back as exactly these bytes: ``1.66GB``, else ``1663214592B``."""
    short = format_size(nbytes).replace(" ", "")
    return short if parse_size(short) == nbytes else f"{nbytes}B"


def choose_budgets(size: ModelSize, slots: int, available: int, count: int = BUDGETS) -> tuple[int, ...]:
    """Budgets evenly spread from the smallest plan to everything resident, or to what there is; three digits each.

    Args:
        slots: fewest that are tried.
        available: bytes of memory that may be planned with.

    Raises:
        BudgetError: not even the smallest plan fits.
    """
    least = _rounded(smallest_budget(size, slots=slots), up=True)
    if least > available:
        what = f"this model needs {format_size(least)} at least, {format_size(available)} are free; free some memory"
        raise BudgetError(what, least)
    most = max(least, min(_rounded(resident_budget(size), up=True), _rounded(available, up=False)))
    between = (_rounded(least + (most - least) * i // (count - 1), up=True) for i in range(1, count - 1))
    return tuple(sorted({least, *between, most}))


def _rounded(nbytes: int, *, up: bool) -> int:
    """To three digits, as people read sizes."""
    digit = 10 ** max(0, len(str(nbytes)) - 3)
    return -(-nbytes // digit) * digit if up else nbytes // digit * digit


def _ways(file: Path, asked: tuple[str, ...] | None) -> tuple[str, ...]:
    """The ways of reading: those asked for, else those that this file system allows."""
    if asked is not None and "direct" not in asked:
        return asked
    try:
        FileReader([file], io="direct", threads=1).close()
    except UsageError:
        if asked is not None:
            raise
        return ("cached",)
    return asked or IO


def _before(output: Path, now: Document) -> Document:
    """What an earlier matrix has left.

    Raises:
        UsageError: it is broken, or of another model or machine, or was measured with other settings.
    """
    instead = "give another file with --output, or --overwrite to measure all again"
    try:
        found = read_record(output, {SCHEMA: Document.of})
        found.settings["grid"]["memory"]
    except (DocumentError, KeyError, TypeError) as e:
        raise UsageError(f"{output}: not a matrix to go on with ({e}); {instead}") from e
    if other := differences(found, now):
        more = f"; {len(other) - 3} more" if len(other) > 3 else ""
        raise UsageError(f"{output} is another measurement ({'; '.join(other[:3])}{more}): {instead}")
    return found


def differences(was: Document, now: Document) -> list[str]:
    """What keeps old runs from standing beside new ones, each such as ``settings.tokens was 8, is 16``.

    Of the machine everything counts but the number of files changed since the commit.
    """
    apart = ("grid", "git_changed_files")
    old, new = (
        {
            f"{part}.{name}": value
            for part in ("settings", "model", "machine")
            for name, value in document.record()[part].items()
            if name not in apart
        }
        for document in (was, now)
    )
    return [f"{k} was {old.get(k)}, is {new.get(k)}" for k in sorted({*old, *new}) if old.get(k) != new.get(k)]
