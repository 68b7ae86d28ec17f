"""The flags of ``outcore report``."""

from __future__ import annotations

from pathlib import Path

from outcore.cli.arguments import add_output_arguments
from outcore.cli.parser import ArgumentParser


def setup_arg_parser() -> ArgumentParser:
    """The command's flags."""
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
