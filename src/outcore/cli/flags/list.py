"""The flags of ``outcore list``."""

from __future__ import annotations

from ..arguments import add_output_arguments
from ..parser import ArgumentParser


def setup_arg_parser() -> ArgumentParser:
    """The command's flags."""
    parser = ArgumentParser(
        prog="outcore list",
        example="outcore list --memory 4GB",
        description="The models in the Hugging Face Hub's cache: what each takes on the disk, the smallest budget that "
        "it runs in, the one from which all of it is resident, and what it would do here. Loads and fetches nothing.",
    )
    parser.add_argument("--cache-dir", metavar="DIR", help="Another cache of the Hub. Default: the Hub's own.")
    parser.add_argument("--memory", metavar="SIZE", help="The budget to compare with. Default: what would be used.")
    parser.add_argument(
        "--context", type=int, metavar="N", help="Tokens of prompt and answer to plan for. Default: 2048."
    )
    add_output_arguments(parser)
    return parser
