"""Rolls caches of every kind back to an earlier state without a second pass, also while their contents are offloaded.

A key-value cache is rolled back by setting its offset: the next tokens overwrite what lies after it. For any other
cache (recurrent states, rotating windows, a model's own class) we keep references to its arrays: mlx-lm then assigns
new arrays or writes to these, and MLX copies an array on write while another reference exists.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from .hooks import arrays_in, flat, handle

# An offloaded cache's attribute with its ``Keeper``. A keeper has no ``__dict__``, so that ``arrays_in`` skips it.
KEEPER = "_outcore_keeper"


class Keeper(Protocol):
    """Holds a cache's keys and values outside memory, as KV offload does."""

    def mark(self, cache: Any) -> Callable[[], None]:
        """Return a function that rolls the cache back to its present state. Both are called between passes."""

    def bring_back(self, cache: Any) -> None:
        """Read the cache's keys and values into memory and stop offloading it.

        Raises:
            StoreError: the disk failed.
        """


def keeper_of(cache: Any) -> Keeper | None:
    keeper: Keeper | None = getattr(cache, "__dict__", {}).get(KEEPER)
    return keeper


def is_away(cache: Any) -> bool:
    """Whether a cache's keys and values are on disk now, so that accessing them would read them."""
    return getattr(type(cache), "outcore_away", False)


def in_memory(caches: Sequence[Any]) -> None:
    """Bring offloaded keys and values of these caches back into memory and stop offloading them."""
    for cache in flat(caches):
        if (keeper := keeper_of(cache)) is not None:
            if is_away(cache):
                keeper.bring_back(cache)
            cache.__dict__.pop(KEEPER, None)


def snapshot_bytes(cache: Sequence[Any]) -> int:
    """Return the bytes that a ``Snapshot`` keeps in memory: the arrays of caches that are not rolled back by offset."""
    return sum(a.nbytes for c in flat(cache) if not by_offset(c) for a in arrays_in(c))


class Snapshot:
    """Remembers the present state of a model's caches.

    Args:
        cache: as from ``mlx_lm.models.cache.make_prompt_cache``. The list itself is restored too, since mlx-lm may
            replace its entries (for example when it quantizes keys and values).
        apart: ``id()`` of each cache that other code rolls back.
    """

    def __init__(self, cache: list[Any], apart: Collection[int] = ()) -> None:
        self._cache = cache
        self._saved = [_saved(c, apart) for c in cache]

    def restore(self) -> None:
        """Roll the caches back. Call it once at most, and not after restoring a snapshot that was made earlier."""
        caches = [back() for back in self._saved]
        if isinstance(self._cache, list):
            self._cache[:] = caches


def by_offset(cache: Any) -> bool:
    """Whether this cache can be rolled back to any token by its offset alone."""
    # Exact types, because a subclass may move data before the offset.
    return type(cache) in (KVCache, QuantizedKVCache) or is_away(cache)


def _saved(value: Any, apart: Collection[int]) -> Callable[[], Any]:
    """Return a function that restores the value and returns it.

    Keeps handles of arrays and entries of containers: mlx-lm writes into lists, objects inside caches, and slices.
    """
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
