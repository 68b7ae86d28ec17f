"""``outcore bench``: measures a model in Outcore at each budget, in mlx-lm, and by naive streaming.

Each row is measured in its own process, between two measurements of the disk.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from outcore.checkpoint.find_model import resolve_model
from outcore.checkpoint.positions import longest_context
from outcore.cli.console import PlainConsole
from outcore.cli.engine import ProgressBar
from outcore.cli.flags import model_name
from outcore.decode.preparation import Preparation, prepare
from outcore.errors import OutcoreError
from outcore.machine.memory import last_resort
from outcore.plan.planner import resident_budget
from outcore.sizes import format_size

from .commands import AUTO
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
from .report.tables import BUSY_LEGEND, LEGEND, ReportTable, main_table, notes


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
