"""The flags of ``outcore bench``; those of mlx_lm.benchmark among them."""

from __future__ import annotations

from outcore.cli.flag_table import FLAGS, Flag, command_parser, flag, grouped, switch
from outcore.cli.parser import ArgumentParser
from outcore.options import IO_MODES

from ..words import AUTO, CACHES, WAYS


def runs(tokens: int, *more: Flag) -> list[Flag]:
    """How each row is measured.

    Args:
        tokens: decoded and timed, unless the user says how many.
        more: further flags in this group.
    """
    cache = f"Page cache, where reads go through it: {' or '.join(CACHES)}; cold: files are dropped before each token."
    return grouped(
        "each run",
        flag("--tokens", "Decoded and timed.", tokens),
        FLAGS["prompt-tokens"].but("-p", help="Tokens of the prompt.", default=32),
        flag("--warmup", "Runs before, not counted.", 1),
        flag("--cache", cache, "cold"),
        *(FLAGS[name] for name in ("repeats", "dtype", "cpu-streams")),
        *more,
    )


def setup_arg_parser() -> ArgumentParser:
    """The command's flags."""
    rows = grouped(
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
    )
    more = [
        flag("--delay", "Seconds to wait before each repeat.", 0, metavar="S"),
        *(FLAGS[name] for name in ("prefill-step-size", "quantize-activations", "slots")),
        flag("--threads", "Reads in flight at once. Default: 4, or 8.", type=int, metavar="N"),
        flag("--limit", "Run rows in a control group of that limit (Linux, as root).", metavar="SIZE"),
        switch("--timeline", "Keep the reads and computations of one decoded token."),
        flag(
            "--generation-tokens -g",
            "As --tokens, but as mlx_lm.benchmark counts them: with the first one, which the prompt's time includes. "
            "Default: one more than --tokens.",
            type=int,
            metavar="N",
        ),
    ]
    ways = "; ".join(f"{name}, {what}" for name, what in WAYS.items())
    return command_parser(
        "outcore bench",
        f"Measure a model's speed and memory, each row in a process of its own: {ways}.",
        "outcore bench mlx-community/Qwen3-8B-4bit --memory 2GB,50% --output results.json",
        "model-flags",
        *rows,
        *runs(16, *more),
        FLAGS["output"].but(help="Write the JSON document there. Default: nowhere."),
    )
