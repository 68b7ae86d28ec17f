"""The grid of ``outcore matrix``: its points, in which order they are measured, and what makes an old run still count.

Numbers and plans in, points out; nothing is measured here.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from outcore.checks import parse_size
from outcore.errors import BudgetError, UsageError
from outcore.plan.model_size import ModelSize
from outcore.plan.planner import make_plan, resident_budget
from outcore.sizes import format_size

from .document import BenchRow, Document, Stat
from .jobs import BenchJob, RunSettings, choose
from .words import BUDGETS, IO, OUTCORE

NONE = "none"
"""How weights are read where nothing is streamed."""
SEED = 20
"""Of the order of the runs: with drift of the disk spread over all axes, and the same each time."""

_NAME = re.compile(r"[0-9.]+[KMGT]?B-(resident|(direct|cached)-[0-9]+-slots-[0-9]+-threads)\.json")


@dataclass(frozen=True, order=True)
class GridPoint:
    """One place in the grid: bytes of the budget, way of reading, slots, reads in flight.

    Where everything is resident nothing is read, whatever the rest says: ``io`` is ``none``, the numbers are 0.
    """

    memory: int
    io: str = NONE
    slots: int = 0
    threads: int = 0

    @property
    def resident(self) -> bool:
        return self.io == NONE

    @property
    def setting(self) -> str:
        """All but the budget, for people."""
        if self.resident:
            return "all resident"
        return f"{self.io}, {self.slots} slots, {self.threads} thread{'s' if self.threads > 1 else ''}"

    @property
    def label(self) -> str:
        return f"{format_size(self.memory)}, {self.setting}"

    @property
    def file(self) -> str:
        """Name of the file that holds its run."""
        how = "resident" if self.resident else f"{self.io}-{self.slots}-slots-{self.threads}-threads"
        return f"{size_text(self.memory)}-{how}.json"


@dataclass(frozen=True)
class Grid:
    """The axes. ``memory`` None: budgets are chosen from the model; ``io`` None: what the file system allows.

    Raises:
        UsageError: a value that cannot be used.
    """

    memory: tuple[int, ...] | None = None
    io: tuple[str, ...] | None = None
    slots: tuple[int, ...] = (2, 3, 4)
    threads: tuple[int, ...] = (1, 4, 8)

    def __post_init__(self) -> None:
        choose("--io", self.io or (), IO)
        for flag, numbers, least in (("--slots", self.slots, 2), ("--threads", self.threads, 1)):
            if any(n < least for n in numbers):
                raise UsageError(f"{flag} {min(numbers)}: at least {least}")
        for name, values in vars(self).items():
            if values == ():
                raise UsageError(f"--{name}: give at least one value")


@dataclass(frozen=True)
class Cell:
    """A point with what is known of it: its row, or why it cannot be run; neither where it was not run yet."""

    point: GridPoint
    row: BenchRow | None = None
    unfit: str | None = None

    @property
    def stat(self) -> Stat | None:
        """Seconds per token; None where there are none."""
        return self.row.speed.s_per_token if self.row is not None and self.row.error is None else None

    @property
    def s_per_token(self) -> float | None:
        """Their median."""
        return self.stat.median if self.stat is not None else None

    @property
    def tps(self) -> float | None:
        """Tokens per second, the inverse of the median time."""
        s = self.s_per_token
        return 1 / s if s else None

    @property
    def busy(self) -> bool:
        """Whether other programs used the machine right before its run."""
        return self.row is not None and self.row.busy

    @property
    def why(self) -> str | None:
        """Why there are no numbers."""
        return self.unfit or (self.row.error if self.row is not None else None)

    @property
    def state(self) -> str:
        """``measured``, ``failed``, ``unfit`` or ``missing``."""
        if self.unfit is not None:
            return "unfit"
        if self.row is None:
            return "missing"
        return "measured" if self.s_per_token is not None else "failed"


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
    try:
        least = make_plan(size, 1, slots=slots).smallest_budget_bytes
    except BudgetError as e:
        if e.smallest is None:
            raise
        least = e.smallest
    least, most = _rounded(least, up=True), _rounded(resident_budget(size), up=True)
    if least > available:
        what = f"this model needs {format_size(least)} at least, {format_size(available)} are free; free some memory"
        raise BudgetError(what, least)
    most = max(least, min(most, _rounded(available, up=False)))
    between = (_rounded(least + (most - least) * i // (count - 1), up=True) for i in range(1, count - 1))
    return tuple(sorted({least, *between, most}))


def _rounded(nbytes: int, *, up: bool) -> int:
    """To three digits, as people read sizes."""
    digit = 10 ** max(0, len(str(nbytes)) - 3)
    return -(-nbytes // digit) * digit if up else nbytes // digit * digit


def cells_of(grid: Grid, sizes: Mapping[str, ModelSize]) -> list[Cell]:
    """Every point of a grid whose budgets and ways of reading are known, with why it does not fit where it does not.

    A budget with which everything is resident has a single point.

    Args:
        sizes: the model's, by way of reading: direct reads take a little more room.
    """
    assert grid.memory is not None and grid.io is not None
    cells: dict[GridPoint, Cell] = {}
    for memory in grid.memory:
        for io in grid.io:
            for slots in grid.slots:
                unfit = None
                try:
                    if not make_plan(sizes[io], memory, slots=slots).streams:
                        cells.setdefault(GridPoint(memory), Cell(GridPoint(memory)))
                        continue
                except BudgetError as e:
                    unfit = str(e)
                for threads in grid.threads:
                    point = GridPoint(memory, io, slots, threads)
                    cells[point] = Cell(point, unfit=unfit)
    return list(cells.values())


def in_order(points: Sequence[GridPoint]) -> list[GridPoint]:
    """The order of the runs: shuffled, so that drift of the machine is not taken for an axis; always the same."""
    return random.Random(SEED).sample(sorted(points), len(points))


def run_of(point: GridPoint, run: RunSettings) -> RunSettings:
    """How a point is measured."""
    return run if point.resident else replace(run, slots=point.slots, threads=point.threads)


def job_of(point: GridPoint, run: RunSettings, folder: str, vocabulary: int) -> BenchJob:
    """The run of a point."""
    job = BenchJob(OUTCORE, folder, point.setting, run_of(point, run), run.context, vocabulary)
    job = replace(job, memory=size_text(point.memory))
    return job if point.resident else replace(job, io=point.io)


def is_run(name: str) -> bool:
    """Whether a file has the name of a run."""
    return _NAME.fullmatch(name) is not None


def differences(was: Document, now: Document) -> list[str]:
    """What keeps an old run from standing for a new one, each such as ``settings.tokens was 8, is 16``.

    Of the machine everything counts but the number of files changed since the commit, and its calibration.
    """
    old, new = (dict(_flat(document.record())) for document in (was, now))
    parts = ("settings.", "model.", "machine.")
    return [
        f"{key} was {_shown(old.get(key))}, is {_shown(new.get(key))}"
        for key in sorted({*old, *new})
        if old.get(key) != new.get(key)
        and key.startswith(parts)
        and not key.startswith(("machine.git_changed_files", "machine.calibration"))
    ]


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """What is in objects within each other, by dotted names."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}" if name else str(key))
    else:
        yield name, list(value) if isinstance(value, tuple) else value


def _shown(value: Any) -> str:
    text = "not given" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def rows_of(cells: Sequence[Cell]) -> list[GridPoint]:
    """The settings, top down: everything resident, then way of reading, slots, threads; of no budget."""
    found = {replace(c.point, memory=0) for c in cells}
    return sorted(found, key=lambda p: (not p.resident, p.io != "direct", p.slots, p.threads))
