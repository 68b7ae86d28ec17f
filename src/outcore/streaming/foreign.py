"""What a rank does in place of a layer of another rank: its caches go on without holding anything, so that offsets and
masks are right.

Keys and values have no width: they have as many tokens as those of the rank whose layer it is, and no bytes. So all
that is done to caches (trimmed, merged, filtered, extended, quantized) is done to these, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from ..model.watched_pass import Advance


def advance(caches: Sequence[Any], advances: Sequence[Advance], batch: int, tokens: int) -> None:
    """Have the caches that a layer is called with go on by so many tokens of so many sequences. It may have none, as
    where a whole text is evaluated in one call."""
    for each in advances if caches else ():
        cache = caches[each.cache]
        if each.tokens:
            nothing = mx.zeros((batch, 1, tokens, 0))
            cache.update_and_fetch(nothing, nothing)
        if isinstance(cache, ArraysCache):
            for entry in each.entries:
                cache[entry] = mx.zeros((batch, 0))
            if each.counted:
                cache.advance(tokens)
