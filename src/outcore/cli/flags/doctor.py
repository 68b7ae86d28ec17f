"""The flags of ``outcore doctor``."""

from __future__ import annotations

from ..arguments import add_model_argument, add_output_arguments
from ..parser import ArgumentParser


def setup_arg_parser() -> ArgumentParser:
    """The command's flags."""
    parser = ArgumentParser(
        prog="outcore doctor",
        example="outcore doctor mlx-community/Qwen3-8B-4bit",
        description="Check in 20 seconds whether what Outcore relies on holds here: reads give the file's bytes, and "
        "come from the disk; slots are what the device sees; reading and computing overlap; streamed answers are the "
        "resident ones. Ends with a page to paste into a report.",
    )
    add_model_argument(
        parser,
        "A local folder or a model of the Hub whose files and plan are looked at, too. Default: none.",
        needed=False,
        code=False,
    )
    add_output_arguments(parser)
    return parser
