"""The flags of ``outcore calibrate``."""

from __future__ import annotations

from ..arguments import (
    MODEL,
    add_compute_arguments,
    add_mirror_argument,
    add_model_argument,
    add_output_arguments,
)
from ..parser import ArgumentParser


def setup_arg_parser() -> ArgumentParser:
    """The command's flags."""
    parser = ArgumentParser(
        prog="outcore calibrate",
        example="outcore calibrate mlx-community/Qwen3-8B-4bit",
        description="Measure the disk that a model is on and how long its layers take, in under a minute; kept for "
        "this machine, device, disk and version of MLX.",
    )
    add_model_argument(parser, f"{MODEL} Default: none; the disk of the cache folder alone.", needed=False)
    add_compute_arguments(parser)
    add_mirror_argument(parser)
    parser.add_argument("--force", action="store_true", help="Measure again what is known already.")
    add_output_arguments(parser)
    return parser
