"""The commands of this package (see ``outcore.cli.commands``). Imports no MLX."""

from __future__ import annotations

from pathlib import Path

from outcore.cli.commands import HUB, ArgumentParser, Command, Flag, flag, grouped
from outcore.cli.flags import FLAGS as SHARED
from outcore.options import IO_MODES

AUTO = "auto"

OUTCORE = "outcore"

WAYS = {
    "mlx-lm": "mlx-lm's own loop, everything resident",
    "plain": "naive streaming: load, compute and release layer by layer",
    OUTCORE: "Outcore at each budget",
}

# Values of --io that a matrix measures by default.
IO = ("direct", "cached")

# The number of budgets of a matrix by default.
BUDGETS = 5


def _command(name: str, about: str, example: str, module: str = "") -> tuple[str, Command]:
    run, flags = f"outcore_bench.{module or f'{name}:run'}", f"outcore_bench.commands:{name.upper()}"
    return name, Command(about, run, flags, example, "measure")


COMMANDS = dict([
    _command(
        "bench",
        "Measure speed and memory at each budget, compared with mlx-lm and naive streaming. Each row runs in a process "
        f"of its own: {'; '.join(f'{name}, {what}' for name, what in WAYS.items())}.",
        f"{HUB} --memory 2GB,50% --output results.json",
    ),
    _command(
        "matrix",
        "Measure every combination of budget, --io and slots, and find the best. Each runs in a process of its own.",
        f"{HUB} --memory 2GB,4GB --slots 2,3",
        "bench:matrix",
    ),
    _command(
        "perplexity",
        "Compute a model's perplexity on a text or a data set, as mlx-lm does.",
        f"{HUB} --memory 4GB --data-path text.txt",
    ),
    _command(
        "report",
        "Write a web page and Markdown from results of outcore bench, matrix and perplexity. What was not measured is "
        "left out.",
        "results.json --output page",
        "report.page:run",
    ),
])  # fmt: skip
FLAGS = {"plan": "outcore_bench.commands:plan"}


def runs(tokens: int, *more: Flag) -> list[Flag]:
    return grouped(
        "each run",
        SHARED["max-tokens"].but(help="Tokens to generate and time.", default=tokens),
        SHARED["prompt-tokens"].but("-p", help="Tokens of the prompt.", default=32),
        *(SHARED[name] for name in ("repeats", "dtype", "cpu-streams")),
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
    *runs(16, *(SHARED[name] for name in ("prefill-step-size", "quantize-activations", "slots"))),
    SHARED["output"].but(help="File for the results, in JSON. Default: none."),
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
    ),
    *runs(8),
    SHARED["output"].but(
        help="File for the results, written after each run. Default: ./MODEL-matrix.json.",
    ),
    SHARED["force"].but(help="Replace an existing file."),
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
    SHARED["seed"].but(group="", help="Seed for the order of a data set. Default: 123.", default=123),
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
    SHARED["output"].but(
        required=True,
        metavar="DIR-or-FILE.html",
        help="The page to write, or a folder for report.html and report.md.",
    ),
    "output-flags",
]


def plan(parser: ArgumentParser) -> None:
    about = (
        "Predict for a published device instead of this machine (without a model, show its published results), or for "
        "a disk of so many GB/s: 2.4; or 2.4,100 with memory of 100 GB/s. A folder with a config.json is enough."
    )
    parser.add(flag("--device", about, metavar="NAME|GB/s"))
    parser.run = "outcore_bench.plan:run"
