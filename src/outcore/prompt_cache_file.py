"""Prompt caches that mlx-lm saved, read without believing what they say of themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import load_prompt_cache

from .checkpoint import read_header
from .errors import UsageError
from .text import one_line


def read_prompt_cache(file: str, name: str) -> tuple[list[Any], dict[str, Any], dict[str, Any]]:
    """A saved prompt cache, what it was made with, and the arguments of the tokenizer that it says.

    Args:
        name: what the error calls it.

    Raises:
        UsageError: it is no such file.
    """
    try:
        # MLX believes what a header says, and reads for as long as it says.
        read_header(Path(file))
        _check_numbers(file)
        cache, metadata = load_prompt_cache(file, return_metadata=True)
        config = json.loads(metadata.get("tokenizer_config", "{}"))
        if not isinstance(cache, list) or not isinstance(config, dict):
            raise ValueError("it holds something else")
        return cache, metadata, config
    except Exception as e:  # whatever mlx-lm makes of a file that is something else
        why = one_line(e).removeprefix(f"{file}: ")
        raise UsageError(f"{name}: not a prompt cache saved by mlx_lm.cache_prompt: {why}") from e


def _check_numbers(file: str) -> None:
    """Refuse names that would be places of a list longer than there are names: MLX fills it up, whatever it takes."""
    arrays, metadata = mx.load(file, return_metadata=True)
    names = [*arrays, *metadata]
    for name in names:
        for part in name.split("."):
            if part.isdigit() and int(part) > len(names):
                raise ValueError(f"it names part {part[:20]}, and has {len(names)}")
