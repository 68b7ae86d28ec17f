"""The flags of ``outcore perplexity``."""

from __future__ import annotations

from outcore.cli.arguments import add_engine_arguments, add_model_argument, add_output_arguments
from outcore.cli.parser import ArgumentParser


def setup_arg_parser() -> ArgumentParser:
    """The command's flags."""
    parser = ArgumentParser(
        prog="outcore perplexity",
        example="outcore perplexity mlx-community/Qwen3-8B-4bit --memory 4GB --data-path text.txt",
        description="Evaluate a model's perplexity on a text or a data set.",
    )
    add_model_argument(parser)
    parser.add_argument("--batch-size", type=int, default=8, help="Sequences that share a sweep. Default: 8.")
    parser.add_argument("--sequence-length", type=int, default=512, help="Tokens of a sequence. Default: 512.")
    parser.add_argument("--num-samples", type=int, default=256, help="Sequences at most; -1 for all. Default: 256.")
    parser.add_argument(
        "--data-path",
        help="A text file in UTF-8, or a data set of the Hugging Face Hub that mlx-lm can read (needs the datasets "
        "package; mlx_lm.perplexity takes allenai/tulu-3-sft-mixture). Default: a text that comes with Python, which "
        "differs between versions of Python.",
    )
    parser.add_argument(
        "--seed", type=int, default=123, help="Seed of the order of a data set; a text keeps its own. Default: 123."
    )
    add_engine_arguments(parser)
    add_output_arguments(parser)
    return parser
