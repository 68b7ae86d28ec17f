"""The flags of this package's commands, and ``outcore plan --device``. Imports no MLX."""

from __future__ import annotations

from pathlib import Path

from outcore.cli.flags import FLAGS
from outcore.cli.parser import ArgumentParser, Flag, flag, grouped
from outcore.options import IO_MODES

from .words import AUTO, BUDGETS, IO, WAYS


def runs(tokens: int, *more: Flag) -> list[Flag]:
    return grouped(
        "each run",
        flag("--tokens", "Tokens to generate and time.", tokens),
        FLAGS["prompt-tokens"].but("-p", help="Tokens of the prompt.", default=32),
        flag("--warmup", "Runs before the timed ones.", 1),
        *(FLAGS[name] for name in ("repeats", "dtype", "cpu-streams")),
        *more,
    )


BENCH: list[str | Flag] = [
    "model-flags",
    *grouped(
        "rows (lists are separated by commas)",
        flag("--memory", f"Budgets, one row each, such as 2GB,50%; {AUTO}: from free memory.", ""),
        flag(
            "--resident",
            "Numbers or shares of resident layers, one row each, such as 0,25%,100%. Default, without --memory: "
            "0%,50%,100%.",
            "",
            metavar="LIST",
        ),
        flag("--modes", f"What to measure. Default: {','.join(WAYS)}.", "", metavar="LIST"),
        flag("--io", f"How to read weights: {', '.join(IO_MODES)}.", AUTO, metavar="LIST"),
        flag("--batch --batch-size -b", "Batch sizes.", "1", metavar="LIST"),
    ),
    *runs(
        16,
        *(FLAGS[name] for name in ("prefill-step-size", "quantize-activations", "slots")),
        flag("--threads", "Reads in flight at once. Default: 4, or 8.", type=int, metavar="N"),
    ),
    FLAGS["output"].but(help="File for the results, in JSON. Default: none."),
    "output-flags",
]

_BUDGETS = f"Budgets, such as 2GB,4GB. Default: {BUDGETS} from the smallest that works to everything resident."

MATRIX: list[str | Flag] = [
    "model_named model revision",
    *grouped(
        "axes (lists are separated by commas)",
        flag("--memory", _BUDGETS, "", metavar="SIZES"),
        flag("--io", "How to read weights.", ",".join(IO), metavar="LIST"),
        flag("--slots", "Slots of the ring.", "2,3,4", metavar="LIST"),
        flag("--threads", "Reads in flight.", "1,4,8", metavar="LIST"),
    ),
    *runs(8),
    FLAGS["output"].but(
        help="File for the results, written after each run. Default: ./MODEL-matrix.json.",
    ),
    FLAGS["force"].but(help="Replace an existing file."),
    "output-flags",
]

PERPLEXITY: list[str | Flag] = [
    "model-flags",
    flag("--batch-size", "Sequences per forward pass.", 8),
    flag("--sequence-length", "Tokens per sequence.", 512),
    flag("--num-samples", "Most sequences; -1 for all.", 256),
    flag(
        "--data-path",
        "A text file in UTF-8, or a data set of the Hugging Face Hub that mlx-lm can read (needs the datasets package; "
        "mlx_lm.perplexity uses allenai/tulu-3-sft-mixture). Default: a text that comes with Python, which differs "
        "between versions of Python.",
    ),
    FLAGS["seed"].but(group="", help="Seed for the order of a data set. Default: 123.", default=123),
    "engine-flags output-flags",
]

REPORT: list[str | Flag] = [
    flag(
        "results",
        "Files written by outcore bench or matrix, or the output of outcore perplexity --json.",
        nargs="+",
        type=Path,
        metavar="RESULT.json",
    ),
    FLAGS["output"].but(
        required=True,
        metavar="DIR-or-FILE.html",
        help="The page to write, or a folder for report.html and report.md.",
    ),
    "output-flags",
]


def plan(parser: ArgumentParser) -> None:
    about = "Predict for a published device instead of this machine; without a model, show its published results."
    parser.add(flag("--device", about, metavar="NAME"))
    parser.run = "outcore_bench.plan:run"
