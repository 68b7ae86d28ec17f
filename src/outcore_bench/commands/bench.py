"""``outcore bench``: speed and memory of a model, ours at each budget beside mlx-lm's and the plain way's."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import fields

from outcore.checkpoint.find_model import resolve_model
from outcore.cli.arguments import model_name
from outcore.cli.console import PlainConsole
from outcore.cli.engine import ProgressBar
from outcore.errors import OutcoreError

from ..document import Document, writable, write_record
from ..jobs import BenchSettings, RunSettings, listed, numbers
from ..processes import names_only
from ..runner import bench
from ..table import WIDTH, show
from ..words import AUTO


def run(args: argparse.Namespace) -> None:
    """Run the command.

    Raises:
        OutcoreError: nothing could be measured.
    """
    chosen, name = settings(args), model_name(args.model)
    output = writable(args.output) if args.output is not None else None
    command = names_only(shlex.join(["outcore", "bench", *args.argv]))

    def keep(document: Document) -> None:
        """After each row, so that a run that is cut off has not been for nothing."""
        if output is not None:
            write_record(output, document.record())

    with ProgressBar() as bar:
        document = bench(resolve_model(args.model, args.revision), name, chosen, command, bar.count, keep)
    args.result.record = document.record()
    finish(document, document)


def finish(document: Document, shown: Document, said: Sequence[str] = ()) -> None:
    """Print some of the rows, and what is said of them.

    Raises:
        OutcoreError: nothing could be measured.
    """
    console = PlainConsole(width=None if sys.stdout.isatty() else WIDTH)
    if shown.rows:
        show(shown, console)
    for line in said:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    first = document.rows[0]
    if all(row.error is not None for row in document.rows):
        raise OutcoreError(f"nothing could be measured: {first.label}: {first.error}")


def settings(args: argparse.Namespace) -> BenchSettings:
    """The flags, checked.

    Raises:
        UsageError: one of them cannot be used.
    """
    return BenchSettings(
        modes=listed(args.modes),
        memory=listed(args.memory),
        resident=listed(args.resident),
        io=listed(args.io) or (AUTO,),
        batch=numbers("--batch", args.batch) or (1,),
        run=RunSettings(**{f.name: getattr(args, f.name) for f in fields(RunSettings)}),
    )
