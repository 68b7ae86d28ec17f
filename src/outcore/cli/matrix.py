"""``outcore matrix``: a model at every budget, way of reading, number of slots and of threads."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from ..bench.heatmap import heatmap
from ..bench.jobs import CACHES, Settings
from ..bench.matrix import BUDGETS, IO, Grid
from ..bench.matrix_runner import MatrixRunner
from ..bench.matrix_table import show_matrix
from ..bench.runner import shown_command
from ..bench.table import WIDTH
from ..errors import OutcoreError, UsageError
from ..model.checkpoint import resolve_model
from ..system.device import COMPUTE_DTYPES
from ..system.memory import given_budget
from .engine import plain_console, progress_bar, warn
from .parser import Parser


def setup_arg_parser() -> argparse.ArgumentParser:
    """The command's flags."""
    parser = Parser(
        prog="outcore matrix",
        description="Measure a model at every combination of budget, way of reading, slots and threads, each in a "
        "process of its own, and say which is best and where speed falls off. Cut off, it goes on where it stopped.",
    )
    parser.add_argument("model", help="A local folder, or a model of the Hugging Face Hub.")
    parser.add_argument("--revision", help="A branch, tag or commit on the Hub.")
    axes = parser.add_argument_group("axes (lists are separated by commas)")
    axes.add_argument(
        "--memory",
        metavar="SIZES",
        help=f"Budgets, such as 2GB,4GB. Default: {BUDGETS}, from the smallest that works to everything resident.",
    )
    axes.add_argument(
        "--io", metavar="LIST", help=f"Ways to read. Default: {','.join(IO)}, or what the file system allows."
    )
    axes.add_argument("--slots", default="2,3,4", metavar="LIST", help="Layers in the ring. Default: %(default)s.")
    axes.add_argument("--threads", default="1,4,8", metavar="LIST", help="Reads in flight. Default: %(default)s.")
    run = parser.add_argument_group("each run")
    run.add_argument("--tokens", type=int, default=8, help="Decoded and timed. Default: %(default)s.")
    run.add_argument("--prompt-tokens", type=int, default=32, help="Default: %(default)s.")
    run.add_argument("--repeats", type=int, default=3, help="Default: %(default)s.")
    run.add_argument("--warmup", type=int, default=1, help="Runs before, not counted. Default: %(default)s.")
    run.add_argument(
        "--cache",
        default="cold",
        help=f"Page cache, where reads go through it: {' or '.join(CACHES)}. Cold: files are dropped from it before "
        "each token. Default: %(default)s.",
    )
    run.add_argument("--dtype", help=f"Compute in {', '.join(COMPUTE_DTYPES)}. Default: as the checkpoint says.")
    run.add_argument("--cpu-streams", type=int, metavar="N", help="CPU device: cores that a linear layer uses.")
    parser.add_argument(
        "--output",
        "-o",
        type=Path,
        metavar="DIR",
        help="Folder for one JSON file a run, matrix.json and the heat map; runs that are there are not measured "
        "again. Default: ./MODEL-matrix.",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="Throw away the runs that are there, and measure all again."
    )
    parser.add_argument("--json", action="store_true", help="End standard output with one line of JSON.")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command.

    Raises:
        OutcoreError: nothing could be measured, or the folder holds other measurements.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    args = setup_arg_parser().parse_args(argv)
    grid, settings = axes(args), each_run(args)
    given = Path(args.model)
    # A model of the Hub is known by its name, one on this machine by its folder's.
    name = given.resolve().name if given.exists() else args.model
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
            shlex.join(["outcore", "matrix", *shown_command(argv, names)]),
            overwrite=args.overwrite,
            progress=bar.count,
        )
        if runner.reused:
            warn(f"outcore matrix: {runner.reused} runs are there already in {output}")
        summary = runner.run()
    notes = []
    picture = {}
    try:
        picture = heatmap(summary)
    except UsageError as e:  # matplotlib is optional, and the numbers are there without it
        notes.append(f"no heat map: {e}; then run the same command again")
    runner.finish(picture, notes)
    show_matrix(summary, plain_console(width=None if sys.stdout.isatty() else WIDTH))
    print(f"{output}: {sum(c.state == 'measured' for c in summary.cells)} runs, {', '.join(['matrix.json', *picture])}")
    if args.json:
        print(json.dumps(summary.record()))
    if summary.verdict() is None:
        raise OutcoreError(f"no point could be measured: {summary.cells[0].point.label}: {summary.cells[0].why}")


def axes(args: argparse.Namespace) -> Grid:
    """The axes, checked.

    Raises:
        UsageError: one of them cannot be used.
    """
    return Grid(
        memory=tuple(sorted({given_budget(s) for s in _list(args.memory)})) if args.memory is not None else None,
        io=_list(args.io) if args.io is not None else None,
        slots=_numbers("--slots", args.slots),
        threads=_numbers("--threads", args.threads),
    )


def each_run(args: argparse.Namespace) -> Settings:
    """What all runs have in common, checked.

    Raises:
        UsageError: one of the flags cannot be used.
    """
    return Settings(
        cache=args.cache,
        tokens=args.tokens,
        prompt_tokens=args.prompt_tokens,
        repeats=args.repeats,
        warmup=args.warmup,
        dtype=args.dtype,
        cpu_streams=args.cpu_streams,
    )


def _list(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def _numbers(flag: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(sorted({int(n) for n in _list(text)}))
    except ValueError:
        raise UsageError(f"{flag} {text}: give whole numbers, separated by commas") from None
