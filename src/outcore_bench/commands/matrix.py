"""``outcore matrix``: a model at every budget, way of reading, number of slots and of threads."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from outcore.checkpoint.find_model import resolve_model
from outcore.cli.arguments import model_name
from outcore.cli.console import PlainConsole
from outcore.cli.engine import progress_bar
from outcore.cli.output import tell
from outcore.errors import OutcoreError, UsageError
from outcore.machine.budget import given_budget
from outcore.text import printable

from ..jobs import RunSettings, listed, numbers
from ..matrix import Grid
from ..matrix_runner import MatrixRunner
from ..runner import shown_command
from ..table import WIDTH, show


def run(args: argparse.Namespace) -> None:
    """Run the command.

    Raises:
        OutcoreError: nothing could be measured, or the folder holds other measurements.
    """
    grid, settings = axes(args), each_run(args)
    name = model_name(args.model)
    output: Path = args.output or Path(f"{name.rsplit('/', 1)[-1]}-matrix")
    if output.exists() and not output.is_dir():
        raise UsageError(f"--output {output}: not a folder")
    names = {args.model: name, str(args.output): output.name}
    with progress_bar() as bar:
        runner = MatrixRunner(
            resolve_model(args.model, args.revision),
            name,
            grid,
            settings,
            output,
            shlex.join(["outcore", "matrix", *shown_command(args.argv, names)]),
            overwrite=args.force,
            progress=bar.count,
        )
        if runner.reused:
            tell(f"outcore matrix: {runner.reused} runs are there already in {output}")
        summary = runner.run()
    console = PlainConsole(width=None if sys.stdout.isatty() else WIDTH)
    if (best := summary.compared().by_budget()) is not None:
        show(best, console)
        console.print()
    for line in summary.lines():
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    runs = sum(c.state == "measured" for c in summary.cells)
    print(f"{printable(str(output))}: {runs} runs, matrix.json")
    args.result.record = summary.record()
    if summary.verdict() is None:
        raise OutcoreError(f"no point could be measured: {summary.cells[0].point.label}: {summary.cells[0].why}")


def axes(args: argparse.Namespace) -> Grid:
    """The axes, checked.

    Raises:
        UsageError: one of them cannot be used.
    """
    return Grid(
        memory=tuple(sorted({given_budget(s) for s in listed(args.memory)})) if args.memory is not None else None,
        io=listed(args.io) if args.io is not None else None,
        slots=tuple(sorted(numbers("--slots", args.slots))),
        threads=tuple(sorted(numbers("--threads", args.threads))),
    )


def each_run(args: argparse.Namespace) -> RunSettings:
    """What all runs have in common, checked.

    Raises:
        UsageError: one of the flags cannot be used.
    """
    names = ("cache", "tokens", "prompt_tokens", "repeats", "warmup", "dtype", "cpu_streams")
    return RunSettings(**{name: getattr(args, name) for name in names})
