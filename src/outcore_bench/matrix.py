"""``outcore matrix``: measures a model at every combination of budget, --io and slots.

The result is a document of ``outcore bench`` that has the axes in ``settings["grid"]``.
"""

from __future__ import annotations

import argparse
import random
import shlex
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

from outcore.checkpoint.find_model import resolve_model
from outcore.checks import choice, parse_size, whole
from outcore.cli.engine import ProgressBar
from outcore.cli.flags import model_name
from outcore.decode.budget import given_budget
from outcore.decode.preparation import prepare
from outcore.errors import UsageError
from outcore.machine.memory import last_resort
from outcore.plan.model_size import ModelSize
from outcore.plan.planner import resident_budget, smallest_budget
from outcore.sizes import format_size
from outcore.text import printable

from .bench import Progress, Runner, finish, vocabulary
from .commands import BUDGETS, IO, OUTCORE
from .document import Document, writable, write_record
from .jobs import BenchJob, RunSettings, listed, names_only, numbers
from .report.tables import by_budget, sentences


def run(args: argparse.Namespace) -> None:
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
