"""The flags of ``outcore info``."""

from __future__ import annotations

from ..arguments import add_engine_arguments, add_model_argument, add_output_arguments, add_planning_arguments
from ..parser import ArgumentParser


def setup_arg_parser() -> ArgumentParser:
    """The command's flags."""
    parser = ArgumentParser(
        prog="outcore info",
        example="outcore info mlx-community/Qwen3-8B-4bit --memory 4GB",
        description="What a model weighs and what would be resident at a budget. Loads nothing: "
        "headers are read, and a block of each tensor to know the model by.",
    )
    add_model_argument(parser)
    add_planning_arguments(parser)
    add_engine_arguments(parser)
    add_output_arguments(parser)
    return parser
