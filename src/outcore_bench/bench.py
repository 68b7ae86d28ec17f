"""``outcore bench``: measures a model in Outcore at each budget, in mlx-lm, and by naive streaming.

Each row is measured in its own process, between two measurements of the disk. ``outcore matrix`` measures every
combination of budget, --io and slots; its document has these axes in ``settings["grid"]``.
"""

from __future__ import annotations

import argparse
import random
import shlex
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from outcore.checkpoint.find_model import resolve_model
from outcore.checkpoint.positions import longest_context
from outcore.checks import choice, parse_size, whole
from outcore.cli.console import PlainConsole
from outcore.cli.engine import ProgressBar
from outcore.cli.flags import model_name
from outcore.decode.budget import given_budget
from outcore.decode.preparation import Preparation, prepare
from outcore.errors import OutcoreError, UsageError
from outcore.machine.memory import last_resort
from outcore.plan.model_size import ModelSize
from outcore.plan.planner import resident_budget, smallest_budget
from outcore.sizes import format_size
from outcore.text import printable

from .commands import AUTO, BUDGETS, IO, OUTCORE
from .disk import describe, machine, weight_files
from .document import BenchRow, Document, set_ceilings, writable, write_record
from .jobs import (
    BenchJob,
    BenchSettings,
    RunSettings,
    failed,
    listed,
    make_jobs,
    measure_disk,
    measure_row,
    names_only,
    numbers,
)
from .report.tables import BUSY_LEGEND, LEGEND, ReportTable, by_budget, main_table, notes, sentences


def run(args: argparse.Namespace) -> None:
    chosen, name = settings(args), model_name(args.model)
    output = writable(args.output) if args.output is not None else None
    command = names_only(shlex.join(["outcore", "bench", *args.argv]))

    def keep(document: Document) -> None:
        if output is not None:
            write_record(output, document.record())

    with ProgressBar() as bar:
        document = bench(resolve_model(args.model, args.revision), name, chosen, command, bar.count, keep)
    args.result.record = document.record()
    finish(document, document)


def finish(document: Document, shown: Document, verdict: Sequence[str] = ()) -> None:
    """Prints the rows of ``shown`` and the verdict; raises OutcoreError if no row of ``document`` has numbers."""
    console = PlainConsole(width=None if sys.stdout.isatty() else WIDTH)
    if shown.rows:
        show(shown, console)
    for line in verdict:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    first = document.rows[0]
    if all(row.error is not None for row in document.rows):
        raise OutcoreError(f"nothing could be measured: {first.label}: {first.error}")


def settings(args: argparse.Namespace) -> BenchSettings:
    return BenchSettings(
        modes=listed(args.modes),
        memory=listed(args.memory),
        resident=listed(args.resident),
        io=listed(args.io) or (AUTO,),
        batch=numbers("--batch", args.batch) or (1,),
        run=RunSettings(**{f.name: getattr(args, f.name) for f in fields(RunSettings)}),
    )


WIDTH = 100


def show(document: Document, console: Console) -> None:
    m, model = document.machine, document.model
    computes_on = f"{m.gpu}, {m.cpu}" if m.gpu else m.cpu
    rates = [f"{r['best_gbps']:.2f}" for r in document.disk.get("measurements", [])]
    measured = f"; disk alone {'-'.join(dict.fromkeys((min(rates), max(rates))))} GB/s" if rates else ""
    lines = [
        f"{model.name}: {model.model_type}, {format_size(model.nbytes)}, {model.layers} layers",
        f"{computes_on}, {m.cores} cores, {format_size(m.memory_bytes)}; {m.filesystem}{measured}",
    ]
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if (table := main_table([document])) is not None:
        console.print(rich_table(table, console.width))
    console.print(LEGEND + BUSY_LEGEND * any(row.busy for row in document.rows), markup=False, highlight=False)
    for note in notes([document]):
        console.print(f"Note: {note}", markup=False, highlight=False, soft_wrap=True)


def rich_table(table: ReportTable, width: int) -> Table:
    """Makes a terminal table of a report's table. Text in brackets goes on the second line of its cell."""
    shown = Table(box=box.SIMPLE_HEAD, padding=0, width=min(width, WIDTH), show_edge=False)
    for i, column in enumerate(table.columns):
        head = column.replace("Efficiency", "Eff.").replace(" ", "\n")
        shown.add_column(head, justify="right" if i else "left", no_wrap=bool(i), overflow="fold")
    for line in table.lines:
        cells = line.cells if line.kind != "error" else (f"{line.cells[0]}: {line.cells[1]}",)
        shown.add_row(*(Text(cell.replace(" (", "\n(")) for cell in cells))
    return shown


# Called with the label of the row that begins, the number of rows that are done, and the number of all rows.
Progress = Callable[[str, int, int], None]


def bench(
    folder: Path,
    name: str,
    settings: BenchSettings,
    command: str,
    progress: Progress = lambda *_: None,
    on_row: Callable[[Document], None] = lambda _: None,
) -> Document:
    """Measures all rows. Calls ``on_row`` after each, so that an interrupted run leaves its results."""
    run, names = settings.run, ("context", "dtype", "prefill_step_size", "model_config", "trust_remote_code")
    prepared = prepare(folder, least=True, **{n: getattr(run, n) for n in names})
    jobs = make_jobs(
        settings,
        str(folder),
        len(prepared.profile.size.layers),
        fits=prepared.refused is None and not prepared.plan.streams,
        vocabulary=vocabulary(prepared),
        longest=longest_context(prepared.profile.lazy.config),
    )
    return Runner(folder, name, prepared, settings.record(), command).run(jobs, progress, on_row)


class Runner:
    def __init__(
        self, folder: Path, name: str, prepared: Preparation, settings: Mapping[str, Any], command: str
    ) -> None:
        self.files = weight_files(folder)
        self._resident_bytes = resident_budget(prepared.profile.size)
        self._rate: float | None = None  # the disk's GB/s; None once a row has run since the measurement
        self.document = Document(
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            command=command,
            machine=machine(folder),
            model=describe(name, prepared),
            settings=dict(settings),
            disk={"measurements": []},
        )

    def run(self, jobs: Iterable[BenchJob], progress: Progress, on_row: Callable[[Document], None]) -> Document:
        rows, document = list(jobs), self.document
        for i, job in enumerate(rows):
            progress(job.label, i, len(rows))
            document.rows.append(self._measure(job))
            compare(document)
            on_row(document)
        return document

    def _measure(self, job: BenchJob) -> BenchRow:
        if job.mode == "mlx-lm" and self._resident_bytes > last_resort():
            needed, free = format_size(self._resident_bytes), format_size(last_resort())
            return failed(job, f"not run: everything resident needs {needed}, {free} are free")
        streams = job.mode != "mlx-lm" and job.resident != self.document.model.layers
        before = self._disk() if streams else None
        self._rate = None
        row = measure_row(job, self.files)
        if streams and row.error is None and row.setting.io != "none":
            rates = [r for r in (before, self._disk()) if r is not None]
            row.reading.disk_gbps = statistics.mean(rates) if rates else None
        return row

    def _disk(self) -> float | None:
        if self._rate is None and (rate := measure_disk(self.files)) is not None:
            disk = self.document.disk
            disk["measurements"].append(asdict(rate) | {"before_row": len(self.document.rows)})
            disk["gbps"] = statistics.median(m["best_gbps"] for m in disk["measurements"])
            self._rate = rate.best_gbps
        return self._rate


def compare(document: Document) -> None:
    """Fills in the values for which several rows are needed: ceilings, and whether tokens equal mlx-lm's."""
    set_ceilings(document)
    good = [row for row in document.rows if row.error is None]
    reference = {row.setting.batch: row.tokens for row in good if row.mode == "mlx-lm"}
    for row in good:
        if row.mode != "mlx-lm" and row.setting.batch in reference:
            row.same_tokens = row.tokens == reference[row.setting.batch]


def vocabulary(prepared: Preparation) -> int:
    config = prepared.profile.lazy.config
    return int(config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size") or 128)


def matrix(args: argparse.Namespace) -> None:
    grid, settings = axes(args), each_run(args)
    name = model_name(args.model)
    output = writable(args.output or Path(f"{name.rsplit('/', 1)[-1]}-matrix.json"))
    if output.exists() and not args.force:
        raise UsageError(f"{output}: already exists; give another file with --output, or replace it with --overwrite")
    command = names_only(shlex.join(["outcore", "matrix", *args.argv]))
    with ProgressBar() as bar:
        folder = resolve_model(args.model, args.revision)
        document = run_matrix(folder, name, grid, settings, output, command, bar.count)
    verdict = sentences(document.rows)
    args.result.record = document.record() | {"verdict": verdict}
    print(f"{printable(str(output))}: {sum(row.error is None for row in document.rows)} runs")
    finish(document, replace(document, rows=by_budget(document.rows)), verdict)


def axes(args: argparse.Namespace) -> Grid:
    return Grid(
        memory=tuple(sorted({given_budget(s) for s in listed(args.memory)})) if args.memory else None,
        io=listed(args.io),
        slots=tuple(sorted(numbers("--slots", args.slots))),
    )


def each_run(args: argparse.Namespace) -> RunSettings:
    names = ("max_tokens", "prompt_tokens", "repeats", "dtype", "cpu_streams")
    return RunSettings(**{name: getattr(args, name) for name in names})


# Seed for shuffling the runs. Shuffled, a drift of the disk does not look like the effect of an axis.
SEED = 20


@dataclass(frozen=True)
class Grid:
    """The axes; the constructor raises UsageError for invalid values. ``memory`` None: choose budgets for the model."""

    memory: tuple[int, ...] | None = None
    io: tuple[str, ...] = IO
    slots: tuple[int, ...] = (2, 3, 4)

    def __post_init__(self) -> None:
        for io in self.io:
            choice("--io", io, IO)
        for n in self.slots:
            whole("--slots", n, 2)
        for name, values in vars(self).items():
            if values == ():
                raise UsageError(f"--{name}: give at least one value")


def run_matrix(
    folder: Path,
    name: str,
    grid: Grid,
    settings: RunSettings,
    output: Path,
    command: str,
    progress: Progress = lambda *_: None,
) -> Document:
    """Measures every point of a grid and writes ``output`` after each. A point that does not fit has an ``error``."""
    names = ("context", "dtype", "cpu_streams")
    prepared = prepare(folder, least=True, prompt=settings.prompt_tokens, **{n: getattr(settings, n) for n in names})
    size = prepared.profile.size
    memory = grid.memory or choose_budgets(size, min(grid.slots), last_resort())
    job = BenchJob(OUTCORE, str(folder), "", settings, settings.context, vocabulary(prepared))
    jobs = jobs_of(replace(grid, memory=memory), resident_budget(size), job)
    common = asdict(settings) | {"grid": asdict(replace(grid, memory=memory))}
    runner = Runner(folder, name, prepared, common, command)
    shuffled = random.Random(SEED).sample(jobs, len(jobs))
    return runner.run(shuffled, progress, lambda document: write_record(output, document.record()))


def jobs_of(grid: Grid, resident: int, job: BenchJob) -> list[BenchJob]:
    """Returns a job for every point of a grid.

    Args:
        resident: the budget from which everything is resident. Such a budget gets only one job, as nothing is read.
        job: the settings that all jobs share.
    """
    jobs = []
    for memory in grid.memory or ():
        shown = format_size(memory)
        whole = replace(job, memory=size_text(memory), label=f"{shown}, all resident")
        if memory >= resident:
            jobs.append(whole)
            continue
        for io, slots in product(grid.io, grid.slots):
            run = replace(job.run, slots=slots)
            jobs.append(replace(whole, io=io, label=f"{shown}, {io}, {slots} slots", run=run))
    return jobs


def size_text(nbytes: int) -> str:
    short = format_size(nbytes).replace(" ", "")
    return short if parse_size(short) == nbytes else f"{nbytes}B"


def choose_budgets(size: ModelSize, slots: int, available: int) -> tuple[int, ...]:
    """Returns budgets from the smallest that works to everything resident, or to ``available`` bytes, with 3 digits."""
    least = smallest_budget(size, slots=slots)
    most = max(least, min(resident_budget(size), available))
    return tuple(sorted({_rounded(least + (most - least) * i // (BUDGETS - 1)) for i in range(BUDGETS)}))


def _rounded(nbytes: int) -> int:
    digit = 10 ** max(0, len(str(nbytes)) - 3)
    return -(-nbytes // digit) * digit
