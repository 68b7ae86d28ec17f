"""``outcore matrix``: a model at every budget, way of reading, number of slots and of threads."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import replace
from pathlib import Path

from outcore.checkpoint.find_model import resolve_model
from outcore.cli.arguments import model_name
from outcore.cli.engine import ProgressBar
from outcore.decode.budget import given_budget
from outcore.errors import UsageError
from outcore.text import printable

from ..document import writable
from ..jobs import RunSettings, listed, numbers
from ..matrix import Grid, run_matrix
from ..processes import names_only
from ..verdict import by_budget, sentences
from .bench import finish


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
