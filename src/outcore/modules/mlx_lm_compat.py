"""Every private name of mlx-lm's models and caches that is touched, in one place: what another version may take away
(0.32.x has them; tests/test_mlx_lm_compat.py says which and what for). Tokenizers' are in ``mlx_lm_tokenizer``."""

from __future__ import annotations

from typing import Any, cast

import mlx.nn as nn
from mlx_lm.models.cache import RotatingKVCache
from mlx_lm.models.cache import _BaseCache as BaseCache

__all__ = ["BaseCache", "classes_of", "set_window_index", "window_index"]


def classes_of(config: dict[str, Any]) -> tuple[type[nn.Module], type]:
    """The classes of a model and of its arguments (``mlx_lm.utils._get_classes``).

    Raises:
        ValueError: mlx-lm does not know the model.
    """
    from mlx_lm import utils

    return cast(tuple[type[nn.Module], type], utils._get_classes(config))


def window_index(cache: RotatingKVCache) -> int:
    """Where a sliding window writes its next token; ``max_size``: from its beginning again, behind ``keep``."""
    return int(cache._idx)


def set_window_index(cache: RotatingKVCache, index: int) -> None:
    """Have it write its next token there."""
    cache._idx = index
