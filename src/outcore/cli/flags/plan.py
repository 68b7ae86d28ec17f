"""The flags of ``outcore plan``."""

from __future__ import annotations

from ..arguments import add_engine_arguments, add_model_argument, add_output_arguments, add_planning_arguments
from ..parser import ArgumentParser


def setup_arg_parser() -> ArgumentParser:
    """The command's flags."""
    parser = ArgumentParser(
        prog="outcore plan",
        example="outcore plan mlx-community/Qwen3-8B-4bit --memory 4GB --plot speed.png",
        description="What would be resident at a budget, how fast it would be and what it would take, item by item; "
        "and speed against memory from the smallest budget to everything resident. Loads nothing. The first time, "
        "this machine is measured, which takes up to a minute.",
    )
    add_model_argument(parser)
    add_planning_arguments(parser)
    parser.add_argument(
        "--no-calibrate", action="store_true", help="Do not measure; predict from assumptions where nothing is known."
    )
    add_engine_arguments(parser)
    add_output_arguments(parser)
    return parser
