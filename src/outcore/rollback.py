"""Taking caches back to where they were, for every kind of cache, without a second sweep.

A key-value cache is taken back by its offset: what lies behind it is overwritten by the next tokens. Of any other
(recurrent states, rotating windows, whatever a model brings) references to its arrays are kept: mlx-lm assigns new ones
or writes to them, and MLX copies what somebody else still refers to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList, KVCache, QuantizedKVCache

Restore = Callable[[], None]


class Snapshot:
    """What a model's caches hold now.

    Args:
        cache: as from ``mlx_lm.models.cache.make_prompt_cache``. The list is kept, for its entries may be replaced
            (mlx-lm does so when it quantizes keys and values).
    """

    def __init__(self, cache: list[Any]) -> None:
        self._cache = cache
        self._saved = [(c, _save(c)) for c in cache]

    def restore(self) -> None:
        """Take the caches back; may be done once, and not after an earlier snapshot was restored."""
        self._cache[:] = [c for c, _ in self._saved]
        for _, restore in self._saved:
            restore()


def snapshot_bytes(cache: Sequence[Any]) -> int:
    """Bytes that a snapshot keeps from being freed once the caches have moved on: of all that is not taken back by an
    offset. Exact for caches that hold their arrays; 0 for empty ones."""
    return sum(_kept_bytes(c) for c in cache)


def by_offset(cache: Any) -> bool:
    """Whether this cache is taken back by its offset alone, to any token."""
    # Their exact types: a class made from one of them may move what lies before the offset.
    return type(cache) in (KVCache, QuantizedKVCache)


def _save(cache: Any) -> Restore:
    if isinstance(cache, CacheList):
        return _all([_save(c) for c in cache.caches])
    names = ("offset",) if by_offset(cache) else tuple(vars(cache))
    values = {name: _held(getattr(cache, name)) for name in names}
    empty = by_offset(cache) and cache.keys is None

    def restore() -> None:
        for name, value in values.items():
            setattr(cache, name, value)
        if empty:
            cache.keys = cache.values = None

    return restore


def _all(parts: Sequence[Restore]) -> Restore:
    def restore() -> None:
        for part in parts:
            part()

    return restore


def _held(value: Any) -> Any:
    """The same, by references of our own: mlx-lm writes into lists and, by assignment to a slice, into arrays."""
    if isinstance(value, mx.array):
        return mx.array(value)
    if isinstance(value, list | tuple):
        return type(value)(_held(v) for v in value)
    if isinstance(value, dict):
        return {key: _held(v) for key, v in value.items()}
    return value


def _kept_bytes(value: Any) -> int:
    if isinstance(value, CacheList):
        return snapshot_bytes(value.caches)
    if isinstance(value, mx.array):
        return int(value.nbytes)
    if isinstance(value, list | tuple):
        return sum(map(_kept_bytes, value))
    if isinstance(value, dict):
        return sum(map(_kept_bytes, value.values()))
    if by_offset(value) or not hasattr(value, "__dict__"):
        return 0
    return sum(map(_kept_bytes, vars(value).values()))
