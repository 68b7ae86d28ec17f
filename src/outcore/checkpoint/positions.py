"""What config.json says of a model before it is opened: all of it, and how many tokens it has positions for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx_lm.utils

from ..errors import CheckpointError
from .config import check_files
from .lazy_model import one_line_of


def config_of(folder: Path) -> dict[str, Any]:
    """A model's config.json as mlx-lm reads it.

    Raises:
        CheckpointError: it cannot be, or a file beside it is none that mlx-lm can be let open.
    """
    check_files(folder)
    try:
        config: dict[str, Any] = mlx_lm.utils.load_config(folder)
        return config
    except Exception as e:  # of generation_config.json too, which it looks into
        raise CheckpointError(f"{folder}: its config.json cannot be loaded: {one_line_of(e)}") from e


LEARNED_POSITIONS = {"gpt2": "n_positions", "gpt_bigcode": "n_positions"}
"""Types of mlx-lm's with a table of positions, and what its rows are called in config.json. All others compute theirs,
for any position."""


def longest_context(config: dict[str, Any]) -> int | None:
    """Tokens that the model was made for, where its config says so: what it has learnt, or is stretched to by a scaling
    of its rotations. mlx-lm goes on beyond them, in text that gets poorer."""
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        longest = part.get("max_position_embeddings")
        if isinstance(longest, int) and longest > 0:
            return max(longest, _stretched(part, longest))
    return position_limit(config)


def _stretched(config: dict[str, Any], longest: int) -> int:
    """Tokens that a rope scaling makes of those that were learnt; 0 without one."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(scaling, dict):
        return 0
    factor, original = scaling.get("factor"), scaling.get("original_max_position_embeddings", longest)
    numbers = all(isinstance(n, int | float) and not isinstance(n, bool) and 0 < n < 2**31 for n in (factor, original))
    return int(factor * original) if numbers else 0


def position_limit(config: dict[str, Any]) -> int | None:
    """Tokens that the model has positions for at all; None: it computes them. Beyond its table there is nothing."""
    rows = config.get(LEARNED_POSITIONS.get(str(config.get("model_type")), ""))
    return rows if isinstance(rows, int) and rows > 0 else None
