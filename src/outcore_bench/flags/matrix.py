"""The flags of ``outcore matrix``."""

from __future__ import annotations

from pathlib import Path

from outcore.cli.arguments import add_model_argument, add_output_arguments
from outcore.cli.parser import ArgumentParser

from ..words import BUDGETS, IO
from .bench import add_measuring_arguments


def setup_arg_parser() -> ArgumentParser:
    """The command's flags."""
    parser = ArgumentParser(
        prog="outcore matrix",
        example="outcore matrix mlx-community/Qwen3-8B-4bit --memory 2GB,4GB --slots 2,3",
        description="Measure a model at every combination of budget, way of reading, slots and threads, each in a "
        "process of its own, and say which is best and where speed falls off. Cut off, it goes on where it stopped.",
    )
    add_model_argument(parser, code=False)
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
    add_measuring_arguments(run)
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
    add_output_arguments(parser)
    return parser
