"""The flags of ``outcore bench``."""

from __future__ import annotations

import argparse
from pathlib import Path

from outcore.cli.arguments import add_compute_arguments, add_model_argument, add_output_arguments
from outcore.cli.parser import ArgumentParser
from outcore.options import IO_MODES

from ..words import AUTO, CACHES, WAYS


def setup_arg_parser() -> ArgumentParser:
    """The command's flags."""
    parser = ArgumentParser(
        prog="outcore bench",
        example="outcore bench mlx-community/Qwen3-8B-4bit --memory 2GB,50% --output results.json",
        description="Measure a model's speed and memory, each row in a process of its own: "
        + "; ".join(f"{name}, {what}" for name, what in WAYS.items())
        + ".",
    )
    add_model_argument(parser)
    _add_rows(parser)
    _add_runs(parser)
    parser.add_argument(
        "--output", "-o", type=Path, metavar="FILE", help="Write the JSON document there. Default: nowhere."
    )
    add_output_arguments(parser)
    return parser


def _add_rows(parser: ArgumentParser) -> None:
    rows = parser.add_argument_group("rows (lists are separated by commas)")
    rows.add_argument(
        "--memory",
        default="",
        metavar="SIZES",
        help=f"A row for each budget, such as 2GB,50%%; {AUTO}: what is free. Default: none.",
    )
    rows.add_argument(
        "--resident",
        default="",
        metavar="LIST",
        help="A row for each number or share of layers kept in memory, such as 0,25%%,100%%. Default, without "
        "--memory: 0%%,50%%,100%%.",
    )
    rows.add_argument("--modes", default="", metavar="LIST", help=f"Default: {','.join(WAYS)}.")
    rows.add_argument(
        "--io", default=AUTO, metavar="LIST", help=f"Ways to read: {', '.join(IO_MODES)}. Default: {AUTO}."
    )
    rows.add_argument(
        "--batch", "--batch-size", "-b", default="1", metavar="LIST", help="Sequences decoded together. Default: 1."
    )


def _add_runs(parser: ArgumentParser) -> None:
    run = parser.add_argument_group("each run")
    length = run.add_mutually_exclusive_group()
    length.add_argument("--tokens", type=int, default=16, help="Decoded and timed. Default: %(default)s.")
    length.add_argument(
        "--generation-tokens",
        "-g",
        type=int,
        metavar="N",
        help="The same as mlx_lm.benchmark counts them: with the first one, which the prompt's time includes. "
        "Default: one more than --tokens.",
    )
    run.add_argument("--prompt-tokens", "-p", type=int, default=32, help="Default: %(default)s.")
    run.add_argument("--repeats", "--num-trials", "-n", type=int, default=3, help="Default: %(default)s.")
    run.add_argument("--warmup", type=int, default=1, help="Runs before, not counted. Default: %(default)s.")
    run.add_argument(
        "--delay", type=int, default=0, metavar="S", help="Seconds to wait before each repeat. Default: 0."
    )
    run.add_argument("--prefill-step-size", type=int, help="Prompt tokens at a time. Default: 2048, or what fits.")
    run.add_argument("--quantize-activations", "-qa", action="store_true", help="Where the quantization allows it.")
    run.add_argument("--pipeline", action="store_true", help=argparse.SUPPRESS)
    add_measuring_arguments(run)
    run.add_argument("--slots", type=int, metavar="N", help="Layers in the ring, at least 2. Default: 3, or 2.")
    run.add_argument("--threads", type=int, metavar="N", help="Reads in flight at once. Default: 4, or 8.")
    run.add_argument(
        "--limit", metavar="SIZE", help="Run rows in a control group of that limit (Linux, as root). Default: none."
    )
    run.add_argument("--limit-modes", default="", metavar="LIST", help="Modes that --limit is for. Default: all.")
    run.add_argument("--timeline", action="store_true", help="Keep the reads and computations of one decoded token.")


def add_measuring_arguments(group: argparse._ActionsContainer) -> None:
    """Add the flags that say under which conditions a run is measured."""
    group.add_argument(
        "--cache",
        default="cold",
        help=f"Page cache, where reads go through it: {' or '.join(CACHES)}. Cold: files are dropped from it before "
        "each token. Default: %(default)s.",
    )
    add_compute_arguments(group)
