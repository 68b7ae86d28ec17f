"""Rolls caches of every kind back to an earlier state without a second pass, also while their contents are offloaded.

A key-value cache is rolled back by its offset: what lies behind it is overwritten by the next tokens. For any other
cache (recurrent states, rotating windows, a model's own) references to its arrays are kept: mlx-lm assigns new arrays
or writes to them, and MLX copies an array on write while another reference exists.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from .hooks import arrays_in, flat, handle

# An offloaded cache's attribute for its ``Keeper``, which has no ``__dict__`` so that ``arrays_in`` skips it.
KEEPER = "_outcore_keeper"


class Keeper(Protocol):
    """Holds a cache's keys and values outside memory, as KV offload does."""

    def mark(self, cache: Any) -> Callable[[], None]:
        """Return a function that rolls the cache back to its present state, between passes."""

    def bring_back(self, cache: Any) -> None:
        """Read the cache's keys and values into memory and stop offloading it.

        Raises:
            StoreError: the disk failed.
        """


def keeper_of(cache: Any) -> Keeper | None:
    keeper: Keeper | None = getattr(cache, "__dict__", {}).get(KEEPER)
    return keeper


def is_away(cache: Any) -> bool:
    """Whether its keys and values are offloaded now, so that accessing them would read them from the disk."""
    return getattr(type(cache), "outcore_away", False)


def in_memory(caches: Sequence[Any]) -> None:
    """Bring offloaded keys and values of these caches back into memory and stop offloading them."""
    for cache in flat(caches):
        if (keeper := keeper_of(cache)) is not None:
            if is_away(cache):
                keeper.bring_back(cache)
            cache.__dict__.pop(KEEPER, None)


def snapshot_bytes(cache: Sequence[Any]) -> int:
    """Return the bytes that a snapshot keeps from being freed once the caches move on: all but those by offset."""
    return sum(a.nbytes for c in flat(cache) if not by_offset(c) for a in arrays_in(c))


class Snapshot:
    """The state of a model's caches when it is made.

    Args:
        cache: as from ``mlx_lm.models.cache.make_prompt_cache``. The list itself is restored too, since mlx-lm may
            replace its entries (for example when it quantizes keys and values).
        apart: ids of caches that are rolled back elsewhere.
    """

    def __init__(self, cache: list[Any], apart: Collection[int] = ()) -> None:
        self._cache = cache
        self._saved = [_saved(c, apart) for c in cache]

    def restore(self) -> None:
        """Roll the caches back. Can be called once, and not after an earlier snapshot was restored."""
        caches = [back() for back in self._saved]
        if isinstance(self._cache, list):
            self._cache[:] = caches


def by_offset(cache: Any) -> bool:
    """Whether this cache can be rolled back to any token by its offset alone."""
    # Exact types, because a subclass may move data before the offset.
    return type(cache) in (KVCache, QuantizedKVCache) or is_away(cache)


def _saved(value: Any, apart: Collection[int]) -> Callable[[], Any]:
    """Return a function that restores the value.

    It holds references of our own, because mlx-lm writes into lists, into objects inside caches and into array slices.
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
