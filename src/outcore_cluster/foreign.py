"""What a rank does in place of a layer of another rank: its caches go on without holding anything, so that offsets and
masks are right.

Keys and values have no width: they have as many tokens as those of the rank whose layer it is, and no bytes. So all
that is done to caches (trimmed, merged, filtered, extended, quantized) is done to these, too.
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
    """Have a cache that was filled (``Stage.fill``) hold as many tokens without their keys and values."""
    for name in ("keys", "values"):
        held = getattr(cache, name, None)
        if any(a.shape[-1] for a in arrays_in(held)):
            setattr(cache, name, tree_map(lambda a: mx.zeros((a.shape[0], 1, a.shape[2], 0), a.dtype), held))


def hold_alike(*caches: Any) -> None:
    """Have caches of one layer hold nothing where one of them does: they are about to be put together, and what filled
    the others (a draft) may have been given up since."""
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
    """Have the caches that a layer is called with go on by so many tokens of so many sequences. It may have none, as
    where a whole text is evaluated in one call."""
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
