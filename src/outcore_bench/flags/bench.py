"""The flags of ``outcore bench``."""

from __future__ import annotations

from outcore.cli.flag_table import FLAGS, Flag, command_parser, flag, switch
from outcore.cli.parser import ArgumentParser
from outcore.options import IO_MODES

from ..words import AUTO, CACHES, WAYS

ROWS, EACH = "rows (lists are separated by commas)", "each run"

CACHE = flag(
    "--cache",
    f"Page cache, where reads go through it: {' or '.join(CACHES)}. Cold: files are dropped from it before each token.",
    EACH,
    default="cold",
)


def runs(tokens: int) -> list[str | Flag]:
    """How each row is measured.

    Args:
        tokens: decoded and timed, unless the user says how many.
    """
    names = ("repeats", "dtype", "cpu-streams")
    return [
        flag("--tokens", "Decoded and timed.", EACH, type=int, default=tokens),
        FLAGS["prompt-tokens"].but("-p", group=EACH, help="Tokens of the prompt.", default=32),
        flag("--warmup", "Runs before, not counted.", EACH, type=int, default=1),
        CACHE,
        *(FLAGS[name].but(group=EACH) for name in names),
    ]


def setup_arg_parser() -> ArgumentParser:
    """The command's flags."""
    shares = "0,25%,100%. Default, without --memory: 0%,50%,100%."
    return command_parser(
        "outcore bench",
        "Measure a model's speed and memory, each row in a process of its own: "
        + "; ".join(f"{name}, {what}" for name, what in WAYS.items())
        + ".",
        "outcore bench mlx-community/Qwen3-8B-4bit --memory 2GB,50% --output results.json",
        "model-flags",
        flag("--memory", f"A row for each budget, such as 2GB,50%; {AUTO}: what is free.", ROWS, default=""),
        flag(
            "--resident",
            f"A row for each number or share of layers kept in memory, such as {shares}",
            ROWS,
            default="",
            metavar="LIST",
        ),
        flag("--modes", f"Ways to run. Default: {','.join(WAYS)}.", ROWS, default="", metavar="LIST"),
        flag("--io", f"Ways to read: {', '.join(IO_MODES)}.", ROWS, default=AUTO, metavar="LIST"),
        flag("--batch --batch-size -b", "Sequences decoded together.", ROWS, default="1", metavar="LIST"),
        *runs(tokens=16),
        flag(
            "--generation-tokens -g",
            "As --tokens, but as mlx_lm.benchmark counts them: with the first one, which the prompt's time "
            "includes. Default: one more than --tokens.",
            EACH,
            type=int,
            metavar="N",
        ),
        flag("--delay", "Seconds to wait before each repeat.", EACH, type=int, default=0, metavar="S"),
        *(FLAGS[name].but(group=EACH) for name in ("prefill-step-size", "quantize-activations", "slots")),
        flag("--threads", "Reads in flight at once. Default: 4, or 8.", EACH, type=int, metavar="N"),
        flag("--limit", "Run rows in a control group of that limit (Linux, as root).", EACH, metavar="SIZE"),
        flag("--limit-modes", "Modes that --limit is for. Default: all.", EACH, default="", metavar="LIST"),
        switch("--timeline", "Keep the reads and computations of one decoded token.", EACH),
        FLAGS["output"].but(help="Write the JSON document there. Default: nowhere."),
    )
