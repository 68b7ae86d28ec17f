"""Advances the caches of another rank's layers without storing keys and values, so that offsets and masks are right.

The keys and values have width 0: as many tokens as on the layer's own rank, and no bytes. So mlx-lm's operations on
caches (trim, merge, filter, extend, quantize) work on these, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models.cache import ArraysCache, CacheList

from outcore.modules.hooks import arrays_in

from .watched_pass import Advance


def empty(cache: Any) -> None:
    """Replaces a cache's keys and values, which ``PipelineStage.fill`` wrote, by as many of width 0."""
    for name in ("keys", "values"):
        held = getattr(cache, name, None)
        if any(a.shape[-1] for a in arrays_in(held)):
            setattr(cache, name, tree_map(lambda a: mx.zeros((a.shape[0], 1, a.shape[2], 0), a.dtype), held))


def hold_alike(*caches: Any) -> None:
    """Empties all ``caches`` (of one layer, about to be merged) if one is empty: only caches of texts that were
    computed while ``PipelineStage.fill`` was on are filled."""
    if all(isinstance(cache, CacheList) for cache in caches):
        for each in zip(*(cache.caches for cache in caches), strict=True):
            hold_alike(*each)
    elif all(isinstance(cache, ArraysCache) for cache in caches):
        for entry in range(len(caches[0].cache)):
            held = [(cache, cache[entry]) for cache in caches if cache[entry] is not None]
            if any(a.shape[-1] == 0 for _, a in held):
                for cache, a in held:
                    cache[entry] = mx.zeros((a.shape[0], 0))
    elif any(a.shape[-1] == 0 for cache in caches for a in arrays_in(getattr(cache, "keys", None))):
        for cache in caches:
            empty(cache)


def advance(caches: Sequence[Any], advances: Sequence[Advance], batch: int, tokens: int) -> None:
    """Advances a layer's caches by ``tokens`` tokens of ``batch`` sequences. ``caches`` is empty if a whole text is
    evaluated in one call."""
    for each in advances if caches else ():
        cache = caches[each.cache]
        if each.tokens:
            empty(cache)
            nothing = mx.zeros((batch, 1, tokens, 0))
            cache.update_and_fetch(nothing, nothing)
        if isinstance(cache, ArraysCache):
            for entry in each.entries:
                cache[entry] = mx.zeros((batch, 0))
            if each.counted:
                cache.advance(tokens)
