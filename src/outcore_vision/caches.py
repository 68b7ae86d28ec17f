"""mlx-vlm's caches as mlx-lm's, so that batches, drafts, KV offload and stored prompts know them.

Both libraries have classes of the same names and methods. What a model makes is turned into mlx-lm's class, which is
what the engine sees between passes. mlx-vlm's code asks recurrent caches and lists for their class and for methods
that mlx-lm's lack; these have both classes while the model runs. Classes of a model's own stay and count as mlx-lm's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import count
from typing import Any, cast

from mlx_lm.models import cache as mlx_lm_caches
from mlx_vlm.models import cache as mlx_vlm_caches

from outcore.modules.mlx_lm_compat import BaseCache

_revisions = count()


class Recurrent(mlx_lm_caches.ArraysCache, mlx_vlm_caches.ArraysCache):
    """mlx-lm's recurrent cache with mlx-vlm's methods, while the model runs. It never records for mlx-vlm's drafts."""

    # mlx-vlm has properties of these names; here they are attributes, as in mlx-lm.
    left_padding = lengths = None
    _left_padding = _lengths = _speculation = None

    @property
    def metadata_revision(self) -> int:
        """Differs each time: what mlx-vlm derived from paddings and lengths earlier may not hold any more."""
        return next(_revisions)

    @metadata_revision.setter
    def metadata_revision(self, _: int) -> None:
        """Told by methods of mlx-vlm's class that change paddings or lengths, as when texts share passes."""


class Listed(mlx_lm_caches.CacheList, mlx_vlm_caches.CacheList):
    """mlx-lm's list of caches, which mlx-vlm's code recognizes, while the model runs."""


_WITHIN: dict[type, type] = {mlx_lm_caches.ArraysCache: Recurrent, mlx_lm_caches.CacheList: Listed}


def as_mlx_lm(made: Any) -> Any:
    """Returns a cache that a model of mlx-vlm has made as one of mlx-lm."""
    kind, caches = type(made), mlx_lm_caches
    if kind is mlx_vlm_caches.KVCache:
        return caches.KVCache()
    if kind is mlx_vlm_caches.RotatingKVCache and not made.keep:
        return caches.RotatingKVCache(max_size=made.max_size, keep=0)
    if kind is mlx_vlm_caches.ArraysCache:
        return caches.ArraysCache(len(made.cache))
    if kind is mlx_vlm_caches.ChunkedKVCache:
        return caches.ChunkedKVCache(made.chunk_size)
    if kind is mlx_vlm_caches.ConcatenateKVCache:
        return caches.ConcatenateKVCache()
    if kind is mlx_vlm_caches.CacheList:
        return caches.CacheList(*map(as_mlx_lm, made.caches))
    if not isinstance(made, BaseCache) and hasattr(made, "__dict__"):
        made.__class__ = _counted(cast(Any, kind))
    return made


@cache
def _asked(kind: Any) -> type | None:
    """Returns a class of mlx-lm's caches with the state that mlx-vlm's class has: keys and values of what it holds, not
    of all that it has room for. None: it has no such class."""
    names = {each.__name__ for each in kind.__mro__ if each.__module__ == mlx_lm_caches.__name__}
    named = [n for n in ("KVCache", "RotatingKVCache", "BatchKVCache", "BatchRotatingKVCache") if n in names]
    state = getattr(mlx_vlm_caches, named[0]).state if named else None
    return type(kind.__name__, (kind,), {"state": state, "__module__": __name__}) if named else None


@cache
def _counted(kind: Any) -> type:
    """Returns a cache class of a model's own as one that counts as mlx-lm's."""
    return type(kind.__name__, (kind, BaseCache), {"__module__": kind.__module__})


@contextmanager
def within(given: Sequence[Any] | None, asked: bool = False) -> Iterator[None]:
    """Gives recurrent caches and lists both libraries' classes while the model runs; ``asked``: layers ask caches of
    others for their state, so those get mlx-vlm's."""
    swapped, left = list[tuple[Any, type]](), list(given or ())
    try:
        while left:
            each = left.pop()
            if (to := _WITHIN.get(type(each)) or (_asked(cast(Any, type(each))) if asked else None)) is not None:
                swapped.append((each, type(each)))
                each.__class__ = to
                left += getattr(each, "caches", ())
            elif each is not None:
                as_mlx_lm(each)  # one that the model's own code has made, as when it splits a batch
        yield
    finally:
        for each, between in swapped:
            each.__class__ = between
