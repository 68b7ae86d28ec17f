"""The flags of this package's commands, and those that it adds to ``outcore plan``. Light: no MLX."""

from __future__ import annotations

import argparse
from pathlib import Path

from outcore.cli.arguments import (
    add_compute_arguments,
    add_engine_arguments,
    add_model_argument,
    add_output_arguments,
)
from outcore.cli.parser import ArgumentParser
from outcore.options import IO_MODES

from .words import AUTO, BUDGETS, CACHES, IO, WAYS


def bench() -> ArgumentParser:
    """Of ``outcore bench``."""
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
    run.add_argument("--tokens", type=int, default=16, help="Decoded and timed. Default: %(default)s.")
    run.add_argument("--prompt-tokens", "-p", type=int, default=32, help="Default: %(default)s.")
    run.add_argument("--repeats", "--num-trials", "-n", type=int, default=3, help="Default: %(default)s.")
    run.add_argument("--warmup", type=int, default=1, help="Runs before, not counted. Default: %(default)s.")
    run.add_argument("--prefill-step-size", type=int, help="Prompt tokens at a time. Default: 2048, or what fits.")
    run.add_argument("--quantize-activations", "-qa", action="store_true", help="Where the quantization allows it.")
    add_measuring_arguments(run)
    run.add_argument("--slots", type=int, metavar="N", help="Layers in the ring, at least 2. Default: 3, or 2.")
    run.add_argument("--threads", type=int, metavar="N", help="Reads in flight at once. Default: 4, or 8.")
    run.add_argument(
        "--limit", metavar="SIZE", help="Run rows in a control group of that limit (Linux, as root). Default: none."
    )
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


def matrix() -> ArgumentParser:
    """Of ``outcore matrix``."""
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


def perplexity() -> ArgumentParser:
    """Of ``outcore perplexity``."""
    parser = ArgumentParser(
        prog="outcore perplexity",
        example="outcore perplexity mlx-community/Qwen3-8B-4bit --memory 4GB --data-path text.txt",
        description="Evaluate a model's perplexity on a text or a data set.",
    )
    add_model_argument(parser)
    parser.add_argument("--batch-size", type=int, default=8, help="Sequences that share a sweep. Default: 8.")
    parser.add_argument("--sequence-length", type=int, default=512, help="Tokens of a sequence. Default: 512.")
    parser.add_argument("--num-samples", type=int, default=256, help="Sequences at most; -1 for all. Default: 256.")
    parser.add_argument(
        "--data-path",
        help="A text file in UTF-8, or a data set of the Hugging Face Hub that mlx-lm can read (needs the datasets "
        "package; mlx_lm.perplexity takes allenai/tulu-3-sft-mixture). Default: a text that comes with Python, which "
        "differs between versions of Python.",
    )
    parser.add_argument(
        "--seed", type=int, default=123, help="Seed of the order of a data set; a text keeps its own. Default: 123."
    )
    add_engine_arguments(parser)
    add_output_arguments(parser)
    return parser


def report() -> ArgumentParser:
    """Of ``outcore report``."""
    parser = ArgumentParser(
        prog="outcore report",
        example="outcore report results.json --output page",
        description="One HTML page, and Markdown, from result files of outcore bench, matrix and perplexity. "
        "What was not measured is left out.",
    )
    parser.add_argument(
        "results",
        nargs="+",
        type=Path,
        metavar="RESULT.json",
        help="Files that outcore bench wrote, a matrix's matrix.json, or what outcore perplexity --json printed.",
    )
    parser.add_argument(
        "--output",
        "-o",
        type=Path,
        required=True,
        metavar="DIR-or-FILE.html",
        help="The page; in a folder it is report.html, with report.md beside it.",
    )
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE.md", help="Write Markdown there. Default: beside a page in a folder."
    )
    add_output_arguments(parser)
    return parser


def plan(parser: ArgumentParser) -> None:
    """Add ``--device`` and ``--plot``."""
    parser.add_argument(
        "--device",
        metavar="NAME",
        help="Predict for a published device instead of this machine; without a model, what the published system does "
        "there. Default: none.",
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="Write speed against memory as PNG or SVG. Default: nowhere."
    )
    parser.run = "outcore_bench.commands.plan:run"
