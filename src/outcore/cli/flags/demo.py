"""The flags of ``outcore demo``."""

from __future__ import annotations

from ..arguments import add_output_arguments
from ..parser import ArgumentParser

PROMPT = "def read_lines(path):\n"
BUDGET = "15MB"


def setup_arg_parser() -> ArgumentParser:
    """The command's flags."""
    parser = ArgumentParser(
        prog="outcore demo",
        example="outcore demo --memory 15MB",
        description="Run the demo model under a budget smaller than its weights, and check it against the resident "
        "one.",
    )
    parser.add_argument(
        "--memory", default=BUDGET, metavar="SIZE", help="The streamed run's budget. Default: %(default)s."
    )
    parser.add_argument("--prompt", "-p", default=PROMPT, help="The prompt. Default: the head of a function.")
    parser.add_argument("--max-tokens", "-m", type=int, default=64, help="Tokens to generate. Default: 64.")
    parser.add_argument(
        "--repeats", type=int, default=3, help="Timed runs of each, in turns; the median counts. Default: 3."
    )
    add_output_arguments(parser)
    return parser
