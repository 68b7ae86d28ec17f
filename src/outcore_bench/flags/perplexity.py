"""The flags of ``outcore perplexity``; those of mlx_lm.perplexity among them."""

from __future__ import annotations

from outcore.cli.flag_table import FLAGS, command_parser, flag
from outcore.cli.parser import ArgumentParser


def setup_arg_parser() -> ArgumentParser:
    """The command's flags."""
    return command_parser(
        "outcore perplexity",
        "Evaluate a model's perplexity on a text or a data set.",
        "outcore perplexity mlx-community/Qwen3-8B-4bit --memory 4GB --data-path text.txt",
        "model-flags",
        flag("--batch-size", "Sequences that share a sweep.", 8),
        flag("--sequence-length", "Tokens of a sequence.", 512),
        flag("--num-samples", "Sequences at most; -1 for all.", 256),
        flag(
            "--data-path",
            "A text file in UTF-8, or a data set of the Hugging Face Hub that mlx-lm can read (needs the datasets "
            "package; mlx_lm.perplexity takes allenai/tulu-3-sft-mixture). Default: a text that comes with Python, "
            "which differs between versions of Python.",
        ),
        FLAGS["seed"].but(
            group="", help="Seed of the order of a data set; a text keeps its own. Default: 123.", default=123
        ),
        "engine-flags",
    )
