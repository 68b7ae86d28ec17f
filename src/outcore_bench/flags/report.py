"""The flags of ``outcore report``."""

from __future__ import annotations

from pathlib import Path

from outcore.cli.flag_table import FLAGS, command_parser, flag
from outcore.cli.parser import ArgumentParser


def setup_arg_parser() -> ArgumentParser:
    """The command's flags."""
    results = "Files that outcore bench wrote, a matrix's matrix.json, or what outcore perplexity --json printed."
    return command_parser(
        "outcore report",
        "One HTML page, and Markdown, from result files of outcore bench, matrix and perplexity. What was not measured "
        "is left out.",
        "outcore report results.json --output page",
        flag("results", results, nargs="+", type=Path, metavar="RESULT.json"),
        FLAGS["output"].but(
            required=True,
            metavar="DIR-or-FILE.html",
            help="The page; in a folder it is report.html, with report.md beside it.",
        ),
    )
