"""The flags of this package's commands, and those that it adds to ``outcore plan``. Light: no MLX."""

from __future__ import annotations

from pathlib import Path

from outcore.cli.flags import FLAGS
from outcore.cli.parser import ArgumentParser, Flag, flag, grouped
from outcore.options import IO_MODES

from .words import AUTO, BUDGETS, IO, WAYS


def runs(tokens: int, *more: Flag) -> list[Flag]:
    """How each row is measured.

    Args:
        tokens: decoded and timed, unless the user says how many.
        more: further flags in this group.
    """
    return grouped(
        "each run",
        flag("--tokens", "Decoded and timed.", tokens),
        FLAGS["prompt-tokens"].but("-p", help="Tokens of the prompt.", default=32),
        flag("--warmup", "Runs before, not counted.", 1),
        *(FLAGS[name] for name in ("repeats", "dtype", "cpu-streams")),
        *more,
    )


BENCH: list[str | Flag] = [
    "model-flags",
    *grouped(
        "rows (lists are separated by commas)",
        flag("--memory", f"A row for each budget, such as 2GB,50%; {AUTO}: what is free.", ""),
        flag(
            "--resident",
            "A row for each number or share of layers kept in memory, such as 0,25%,100%. Default, without --memory: "
            "0%,50%,100%.",
            "",
            metavar="LIST",
        ),
        flag("--modes", f"Ways to run. Default: {','.join(WAYS)}.", "", metavar="LIST"),
        flag("--io", f"Ways to read: {', '.join(IO_MODES)}.", AUTO, metavar="LIST"),
        flag("--batch --batch-size -b", "Sequences decoded together.", "1", metavar="LIST"),
    ),
    *runs(
        16,
        *(FLAGS[name] for name in ("prefill-step-size", "quantize-activations", "slots")),
        flag("--threads", "Reads in flight at once. Default: 4, or 8.", type=int, metavar="N"),
    ),
    FLAGS["output"].but(help="Write the JSON document there. Default: nowhere."),
    "output-flags",
]

_BUDGETS = f"Budgets, such as 2GB,4GB. Default: {BUDGETS}, from the smallest that works to everything resident."

MATRIX: list[str | Flag] = [
    "model_named model revision",
    *grouped(
        "axes (lists are separated by commas)",
        flag("--memory", _BUDGETS, "", metavar="SIZES"),
        flag("--io", "Ways to read.", ",".join(IO), metavar="LIST"),
        flag("--slots", "Layers in the ring.", "2,3,4", metavar="LIST"),
        flag("--threads", "Reads in flight.", "1,4,8", metavar="LIST"),
    ),
    *runs(8),
    FLAGS["output"].but(
        help="JSON document, written after each run. Default: ./MODEL-matrix.json.",
    ),
    FLAGS["force"].but(help="Replace what is there."),
    "output-flags",
]

PERPLEXITY: list[str | Flag] = [
    "model-flags",
    flag("--batch-size", "Sequences that share a sweep.", 8),
    flag("--sequence-length", "Tokens of a sequence.", 512),
    flag("--num-samples", "Sequences at most; -1 for all.", 256),
    flag(
        "--data-path",
        "A text file in UTF-8, or a data set of the Hugging Face Hub that mlx-lm can read (needs the datasets package; "
        "mlx_lm.perplexity takes allenai/tulu-3-sft-mixture). Default: a text that comes with Python, which differs "
        "between versions of Python.",
    ),
    FLAGS["seed"].but(
        group="", help="Seed of the order of a data set; a text keeps its own. Default: 123.", default=123
    ),
    "engine-flags output-flags",
]

REPORT: list[str | Flag] = [
    flag(
        "results",
        "Files that outcore bench wrote, a matrix's matrix.json, or what outcore perplexity --json printed.",
        nargs="+",
        type=Path,
        metavar="RESULT.json",
    ),
    FLAGS["output"].but(
        required=True,
        metavar="DIR-or-FILE.html",
        help="The page; in a folder it is report.html, with report.md beside it.",
    ),
    "output-flags",
]


def plan(parser: ArgumentParser) -> None:
    """Add ``--device``."""
    about = "Predict for a published device instead of this machine; without a model, what theirs does there."
    parser.add(flag("--device", about, metavar="NAME"))
    parser.run = "outcore_bench.plan:run"
