"""``outcore matrix``: the rows of a bench at every budget, way of reading, number of slots and of reads in flight.

What is measured is a bench's document, with the axes as ``settings["grid"]``.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

from outcore.checks import choice, parse_size, whole
from outcore.decode.preparation import prepare
from outcore.errors import UsageError
from outcore.machine.memory import last_resort
from outcore.plan.model_size import ModelSize
from outcore.plan.planner import resident_budget, smallest_budget
from outcore.sizes import format_size

from .document import Document, write_record
from .jobs import BenchJob, RunSettings
from .runner import Progress, Runner, vocabulary
from .words import BUDGETS, IO, OUTCORE

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
