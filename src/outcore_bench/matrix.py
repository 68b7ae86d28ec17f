"""``outcore matrix``: the rows of a bench at every budget, way of reading, number of slots and of reads in flight.

What is measured is a bench's document, with the axes as ``settings["grid"]``.
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
from outcore.cli.arguments import model_name
from outcore.cli.engine import ProgressBar
from outcore.decode.budget import given_budget
from outcore.decode.preparation import prepare
from outcore.errors import UsageError
from outcore.machine.memory import last_resort
from outcore.plan.model_size import ModelSize
from outcore.plan.planner import resident_budget, smallest_budget
from outcore.sizes import format_size
from outcore.text import printable

from .bench import Progress, Runner, finish, vocabulary
from .document import Document, writable, write_record
from .jobs import BenchJob, RunSettings, listed, numbers
from .processes import names_only
from .verdict import by_budget, sentences
from .words import BUDGETS, IO, OUTCORE


def run(args: argparse.Namespace) -> None:
    """Run the command.

    Raises:
        OutcoreError: nothing could be measured, or the file is there already.
    """
    grid, settings = axes(args), each_run(args)
    name = model_name(args.model)
    output = writable(args.output or Path(f"{name.rsplit('/', 1)[-1]}-matrix.json"))
    if output.exists() and not args.force:
        raise UsageError(f"{output} is there already: give another file with --output, or --overwrite to replace it")
    command = names_only(shlex.join(["outcore", "matrix", *args.argv]))
    with ProgressBar() as bar:
        folder = resolve_model(args.model, args.revision)
        document = run_matrix(folder, name, grid, settings, output, command, bar.count)
    said = sentences(document.rows)
    args.result.record = document.record() | {"verdict": said}
    print(f"{printable(str(output))}: {sum(row.error is None for row in document.rows)} runs")
    finish(document, replace(document, rows=by_budget(document.rows)), said)


def axes(args: argparse.Namespace) -> Grid:
    """The axes, checked.

    Raises:
        UsageError: one of them cannot be used.
    """
    return Grid(
        memory=tuple(sorted({given_budget(s) for s in listed(args.memory)})) if args.memory else None,
        io=listed(args.io),
        slots=tuple(sorted(numbers("--slots", args.slots))),
        threads=tuple(sorted(numbers("--threads", args.threads))),
    )


def each_run(args: argparse.Namespace) -> RunSettings:
    """What all runs have in common, checked.

    Raises:
        UsageError: one of the flags cannot be used.
    """
    names = ("tokens", "prompt_tokens", "repeats", "warmup", "dtype", "cpu_streams")
    return RunSettings(**{name: getattr(args, name) for name in names})


SEED = 20
"""Of the order of the runs, which is shuffled so that drift of the disk is not taken for an axis; always the same."""


@dataclass(frozen=True)
class Grid:
    """The axes. ``memory`` None: budgets are to be chosen from the model.

    Raises:
        UsageError: a value that cannot be used.
    """

    memory: tuple[int, ...] | None = None
    io: tuple[str, ...] = IO
    slots: tuple[int, ...] = (2, 3, 4)
    threads: tuple[int, ...] = (1, 4, 8)

    def __post_init__(self) -> None:
        for io in self.io:
            choice("--io", io, IO)
        for n in self.slots:
            whole("--slots", n, 2)
        for n in self.threads:
            whole("--threads", n)
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
    """Measure every point of a grid; ``output`` is written anew after each. A point that does not fit has an ``error``.

    Args:
        folder: of the model; ``name``: what the document calls it.
        settings: what every run has in common.

    Raises:
        CheckpointError, UsageError: the model or the settings cannot be used.
    """
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
    """A job for every point of a grid whose budgets are known.

    Args:
        resident: a budget from which on everything is resident: one job then, for nothing is read, whatever the rest
            says.
        job: what they have in common.
    """
    found = []
    for memory in grid.memory or ():
        shown = format_size(memory)
        whole = replace(job, memory=size_text(memory), label=f"{shown}, all resident")
        if memory >= resident:
            found.append(whole)
            continue
        for io, slots, threads in product(grid.io, grid.slots, grid.threads):
            label = f"{shown}, {io}, {slots} slots, {threads} thread{'s' * (threads > 1)}"
            found.append(replace(whole, io=io, label=label, run=replace(job.run, slots=slots, threads=threads)))
    return found


def size_text(nbytes: int) -> str:
    """A size without spaces that reads back as exactly these bytes: ``1.66GB``, else ``1663214592B``."""
    short = format_size(nbytes).replace(" ", "")
    return short if parse_size(short) == nbytes else f"{nbytes}B"


def choose_budgets(size: ModelSize, slots: int, available: int) -> tuple[int, ...]:
    """Budgets evenly spread from the smallest plan to everything resident, or to what there is; three digits each.

    Args:
        slots: fewest that are tried.
        available: bytes of memory that may be planned with.
    """
    least = smallest_budget(size, slots=slots)
    most = max(least, min(resident_budget(size), available))
    return tuple(sorted({_rounded(least + (most - least) * i // (BUDGETS - 1)) for i in range(BUDGETS)}))


def _rounded(nbytes: int) -> int:
    """Up to three digits, as people read sizes."""
    digit = 10 ** max(0, len(str(nbytes)) - 3)
    return -(-nbytes // digit) * digit
