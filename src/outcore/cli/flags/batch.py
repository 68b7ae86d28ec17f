"""The flags of ``outcore batch``."""

from __future__ import annotations

from pathlib import Path

from ...plan.workload import MOST
from ..arguments import add_engine_arguments, add_model_argument, add_output_arguments
from ..parser import ArgumentParser


def setup_arg_parser() -> ArgumentParser:
    """The command's flags."""
    parser = ArgumentParser(
        prog="outcore batch",
        example="outcore batch mlx-community/Qwen3-8B-4bit --memory 4GB --input requests.jsonl --output answers.jsonl",
        description="Answer a file of requests in OpenAI's batch format. As many as there is memory for share each "
        "sweep over the weights, and new ones join as others finish. A run that was killed goes on with --resume.",
    )
    add_model_argument(parser, adapter=True)
    parser.add_argument("--input", "-i", type=Path, required=True, metavar="FILE", help="Requests, one JSON a line.")
    parser.add_argument("--output", "-o", type=Path, required=True, metavar="FILE", help="Answers, one JSON a line.")
    parser.add_argument(
        "--max-tokens",
        "-m",
        type=int,
        default=512,
        help="Most tokens of an answer, where a request does not say. Default: 512.",
    )
    parser.add_argument(
        "--concurrency", type=int, default=MOST, metavar="N", help="Requests at most that share a sweep. Default: 32."
    )
    parser.add_argument("--prefill-step-size", type=int, help="Prompt tokens at a time. Default: 2048, or what fits.")
    there = parser.add_mutually_exclusive_group()
    there.add_argument("--resume", action="store_true", help="Go on with an output that is there already.")
    there.add_argument("--overwrite", action="store_true", help="Replace an output that is there already.")
    add_engine_arguments(parser)
    add_output_arguments(parser)
    return parser
