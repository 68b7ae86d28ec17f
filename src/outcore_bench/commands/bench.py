"""``outcore bench``: speed and memory of a model, ours at each budget beside mlx-lm's and the plain way's."""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import fields
from functools import partial
from pathlib import Path

from outcore.checkpoint.find_model import resolve_model
from outcore.checks import parse_size
from outcore.cli.arguments import model_name
from outcore.cli.console import PlainConsole
from outcore.cli.engine import progress_bar
from outcore.errors import OutcoreError, UsageError

from ..document import Document
from ..jobs import BenchSettings, RunSettings, listed, numbers
from ..runner import Runner, shown_command
from ..table import WIDTH, show
from ..words import AUTO


def run(args: argparse.Namespace) -> None:
    """Run the command.

    Raises:
        OutcoreError: nothing could be measured.
    """
    chosen = settings(args)
    output: Path | None = args.output
    if output is not None and not output.absolute().parent.is_dir():
        raise UsageError(f"--output {output}: no such folder")
    name = model_name(args.model)
    names = {args.model: name} | ({str(output): output.name} if output is not None else {})
    with progress_bar() as bar:
        runner = Runner(
            resolve_model(args.model, args.revision),
            name,
            chosen,
            shlex.join(["outcore", "bench", *shown_command(args.argv, names)]),
            progress=bar.count,
            on_row=partial(_write, output),
        )
        document = runner.run()
    show(document, PlainConsole(width=None if sys.stdout.isatty() else WIDTH))
    args.result.record = document.record()
    if all(row.error is not None for row in document.rows):
        raise OutcoreError(f"no row could be measured: {document.rows[0].label}: {document.rows[0].error}")


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
        limit=parse_size(args.limit, flag="--limit") if args.limit is not None else None,
        run=RunSettings(**{f.name: getattr(args, f.name) for f in fields(RunSettings)}),
    )


def _write(output: Path | None, document: Document) -> None:
    """After each row, so that a run that is cut off has not been for nothing."""
    try:
        if output is not None:
            document.write(output)
    except OSError as e:
        raise OutcoreError(f"--output {output}: cannot be written: {e.strerror}") from e
