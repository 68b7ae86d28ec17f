"""Taking caches back to where they were, for every kind of cache, without a second pass.

A key-value cache is taken back by its offset: what lies behind it is overwritten by the next tokens. Of any other
(recurrent states, rotating windows, whatever a model brings) references to its arrays are kept: mlx-lm assigns new ones
or writes to them, and MLX copies what somebody else still refers to.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from .hooks import handle

KEEPER = "_outcore_keeper"
"""The attribute of such a cache. What it refers to has no ``__dict__``: who looks for a cache's arrays passes it by."""


class Snapshot:
    """What a model's caches hold now.

    Args:
        cache: as from ``mlx_lm.models.cache.make_prompt_cache``. The list is kept, for its entries may be replaced
            (mlx-lm does so when it quantizes keys and values).
        apart: ids of caches that somebody else takes back.
    """

    def __init__(self, cache: list[Any], apart: Collection[int] = ()) -> None:
        self._cache = cache
        self._saved = [_saved(c, apart) for c in cache]

    def restore(self) -> None:
        """Take the caches back; may be done once, and not after an earlier snapshot was restored."""
        caches = [back() for back in self._saved]
        if isinstance(self._cache, list):
            self._cache[:] = caches


def by_offset(cache: Any) -> bool:
    """Whether this cache is taken back by its offset alone, to any token."""
    # Their exact types: a class made from one of them may move what lies before the offset.
    return type(cache) in (KVCache, QuantizedKVCache) or getattr(type(cache), "outcore_away", False)


def _saved(value: Any, apart: Collection[int]) -> Callable[[], Any]:
    """What gives the value back as it is now, by references of our own: mlx-lm writes into lists, into objects inside
    of caches and, by assignment to a slice, into arrays."""
    if isinstance(value, mx.array):
        array = handle(value)
        return lambda: array
    if isinstance(value, list | tuple):
        parts = [_saved(v, apart) for v in value]
        return lambda: type(value)(part() for part in parts)
    if isinstance(value, dict):
        entries = {key: _saved(v, apart) for key, v in value.items()}
        return lambda: {key: entry() for key, entry in entries.items()}
    if id(value) in apart or not hasattr(value, "__dict__") or callable(value):
        return lambda: value
    names = ["offset"] if by_offset(value) else list(vars(value))
    if type(value) in (KVCache, QuantizedKVCache) and value.keys is None:
        names += ["keys", "values"]
    attributes = {name: _saved(getattr(value, name), apart) for name in names}

    def restored() -> Any:
        for name, attribute in attributes.items():
            setattr(value, name, attribute())
        return value

    return restored
