"""The private names of mlx-lm's models and caches that Outcore uses; another version may lack them.

mlx-lm 0.32.x has them; tests/test_mlx_lm_compat.py lists their uses. ``mlx_lm_tokenizer`` has those of tokenizers.
"""

from __future__ import annotations

from typing import Any, cast

import mlx.nn as nn
from mlx_lm.models.cache import RotatingKVCache
from mlx_lm.models.cache import _BaseCache as BaseCache

from ..packages import modules

__all__ = ["MODEL_TYPES", "BaseCache", "classes_of", "set_window_index", "window_index"]

# Key of a model's configuration, which ``model_config`` may set: the package that makes its classes.
MODEL_TYPES = "outcore_model_types"


def classes_of(config: dict[str, Any]) -> tuple[type[nn.Module], type]:
    """Return the classes of a model and its arguments (``mlx_lm.utils._get_classes``).

    A type that mlx-lm lacks may be one of a package's (group ``model_types``): its function of this name returns None
    for types that it does not know. Its models have mlx-lm's form: called with tokens and ``cache``, they return
    logits; ``make_cache`` makes mlx-lm's caches or own ones derived from them. A configuration that names a package at
    ``MODEL_TYPES`` has that package's classes even if mlx-lm knows the type.
    """
    from mlx_lm import utils

    named = config.get(MODEL_TYPES)
    for name, package in modules("model_types").items() if named is not None else ():
        if name == named and (found := package.classes_of(config)) is not None:
            return cast(tuple[type[nn.Module], type], found)
    try:
        return cast(tuple[type[nn.Module], type], utils._get_classes(config))
    except ValueError:
        for package in modules("model_types").values():
            if (found := package.classes_of(config)) is not None:
                return cast(tuple[type[nn.Module], type], found)
        raise


def window_index(cache: RotatingKVCache) -> int:
    """Return the index at which a sliding window writes its next token; ``max_size``: it writes at ``keep``."""
    return int(cache._idx)


def set_window_index(cache: RotatingKVCache, index: int) -> None:
    cache._idx = index
