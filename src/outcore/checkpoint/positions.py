"""What config.json says about a model before it is opened, above all its longest context."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx_lm.utils

from ..errors import CheckpointError
from .checkpoint import check_files
from .lazy_model import one_line_of


def config_of(folder: Path) -> dict[str, Any]:
    """Read a model's config.json as mlx-lm does."""
    check_files(folder)
    try:
        config: dict[str, Any] = mlx_lm.utils.load_config(folder)
        return config
    except Exception as e:  # also for generation_config.json, which mlx-lm reads too
        raise CheckpointError(f"{folder}: its config.json cannot be loaded: {one_line_of(e)}") from e


# The config key with the number of learned positions, by model type. All other types compute any position.
LEARNED_POSITIONS = {"gpt2": "n_positions", "gpt_bigcode": "n_positions"}


def longest_context(config: dict[str, Any]) -> int | None:
    """Return the number of tokens that the model was made for, including a rope scaling; None if the config does not
    say.

    mlx-lm accepts longer texts, but what it writes gets worse.
    """
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        longest = part.get("max_position_embeddings")
        if isinstance(longest, int) and longest > 0:
            return max(longest, _stretched(part, longest))
    return position_limit(config)


def _stretched(config: dict[str, Any], longest: int) -> int:
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(scaling, dict):
        return 0
    factor, original = scaling.get("factor"), scaling.get("original_max_position_embeddings", longest)
    numbers = all(isinstance(n, int | float) and not isinstance(n, bool) and 0 < n < 2**31 for n in (factor, original))
    return int(factor * original) if numbers else 0


def position_limit(config: dict[str, Any]) -> int | None:
    """Return how many learned positions the model has: no text can be longer. None if it computes positions."""
    rows = config.get(LEARNED_POSITIONS.get(str(config.get("model_type")), ""))
    return rows if isinstance(rows, int) and rows > 0 else None
