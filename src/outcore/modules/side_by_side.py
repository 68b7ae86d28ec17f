"""Batches of sequences whose caches mlx-lm merges: which models allow that, and own memory for caches split off."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.models.cache import CacheList, make_prompt_cache

from .hooks import arrays_in, caches_in, copy_of

# mlx-lm modules whose models fail or produce other tokens when sequences of several lengths share a batch, in mlx-lm's
# own ``BatchGenerator`` too (0.32.2).
NOT_MERGEABLE = {"afm7", "gemma2", "gpt_bigcode", "minimax_m3_vl", "phi3small", "recurrent_gemma"}


def mergeable(model: nn.Module) -> bool:
    def merges(cache: Any) -> bool:
        return all(map(merges, cache.caches)) if isinstance(cache, CacheList) else hasattr(cache, "merge")

    apart = any(type(m).__module__.rpartition(".")[2] in NOT_MERGEABLE for m in (model, *model.children().values()))
    caches = [] if apart else make_prompt_cache(model)
    return bool(caches) and all(map(merges, caches))


def own_memory(caches: Sequence[Any]) -> None:
    """Copy the caches' arrays to new memory: a cache split off from a batch would keep the whole batch's memory."""
    for cache in caches_in(*caches):
        for name, value in list(vars(cache).items()):
            if arrays_in(value):
                own = tree_map(lambda a: copy_of(a) if isinstance(a, mx.array) else a, value)
                # Evaluate each attribute by itself, so that only its arrays are in memory twice.
                mx.eval(arrays_in(own))
                vars(cache)[name] = own
