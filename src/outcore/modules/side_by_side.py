"""Sequences side by side in caches that mlx-lm merges: which models can, and caches cut out of several sequences'."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.models.cache import CacheList, make_prompt_cache

from .call_values import caches_in, copy_of
from .hooks import arrays_in

NOT_MERGEABLE = {"afm7", "gemma2", "gpt_bigcode", "minimax_m3_vl", "phi3small", "recurrent_gemma"}
"""Modules of mlx-lm whose models fail, or make other tokens, when sequences of several lengths run side by side: in its
own ``BatchGenerator`` too (0.32.2)."""


def mergeable(model: nn.Module) -> bool:
    """Whether several sequences of this model can run side by side, in caches that mlx-lm merges."""

    def merges(cache: Any) -> bool:
        return all(map(merges, cache.caches)) if isinstance(cache, CacheList) else hasattr(cache, "merge")

    apart = any(type(m).__module__.rpartition(".")[2] in NOT_MERGEABLE for m in (model, *model.children().values()))
    caches = [] if apart else make_prompt_cache(model)
    return bool(caches) and all(map(merges, caches))


def own_memory(caches: Sequence[Any]) -> None:
    """Have caches' arrays in memory of their own: one that was cut out of several sequences' keeps all of theirs."""
    for cache in caches_in(*caches):
        for name, value in list(vars(cache).items()):
            if arrays_in(value):
                own = tree_map(lambda a: copy_of(a) if isinstance(a, mx.array) else a, value)
                # One by one: before and after are there at once.
                mx.eval(arrays_in(own))
                vars(cache)[name] = own
