"""Restores caches to their state before a failed pass.

While a pass's graph is built, caches already hold arrays that are not computed yet, derived from slots that will be
overwritten. So the undo needs the earlier arrays as well as the offsets. But while anything else refers to a key-value
cache's arrays, MLX copies them for every token instead of writing in place. So the undo drops its references as soon as
a unit's work, caches included, is about to be handed to the device: the new arrays have the same earlier tokens.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import RotatingKVCache

from ..modules.cache_rollback import KEEPER, Snapshot, by_offset
from ..modules.hooks import flat, handle
from ..modules.mlx_lm_compat import set_window_index, window_index

# Caches, each with the arrays that it held when it was last looked at.
Moved = list[tuple["Written", Any]]


@dataclass
class Written:
    """A cache that is written in place.

    Attributes:
        base: arrays with all tokens from before the pass; None: there were none, or the cache's own arrays have them.
        offset: tokens in the cache at the last check.
        whole: the cache's own arrays still have all tokens from before the pass.
        overwritten: in a full sliding window, the entry that the next token replaces.
    """

    cache: Any
    base: Any
    offset: int
    whole: bool = False
    overwritten: _Overwritten | None = None


class Undo:
    """Restores caches (as from ``make_prompt_cache``) to their state before a pass over ``tokens`` tokens. The pass may
    replace entries of the list."""

    def __init__(self, cache: list[Any], tokens: int) -> None:
        kept = {id(c): c for c in flat(cache) if KEEPER in getattr(c, "__dict__", ())}
        self._kept = [c.__dict__[KEEPER].mark(c) for c in kept.values()]
        self._written = []
        for c in _inner(cache):
            window = type(c) is RotatingKVCache
            if id(c) not in kept and (not window or (tokens == 1 and _in_place(c))):
                self._written.append(Written(c, _arrays(c), c.offset, overwritten=_Overwritten(c) if window else None))
        windows = [w.overwritten for w in self._written if w.overwritten is not None]
        mx.eval([w.arrays for w in windows])
        self._snapshot = Snapshot(cache, apart={id(w.cache) for w in windows} | kept.keys())

    def begin(self) -> None:
        """Begins a pass, perhaps a later one of the same prompt: keeps the arrays that the caches hold now."""
        for w in self._written:
            w.base, w.offset, w.whole = _arrays(w.cache), w.cache.offset, False

    def moved(self) -> Moved:
        """Returns the caches that changed since the last call, with their arrays."""
        found: Moved = []
        for w in self._written:
            if w.cache.offset != w.offset:
                w.offset = w.cache.offset
                found.append((w, _arrays(w.cache)))
        return found

    def reached(self, moved: Moved) -> None:
        """Keeps these arrays, which are about to be computed, in place of the caches' earlier arrays."""
        for w, arrays in moved:
            w.base = arrays

    def passed(self) -> None:
        """Drops all kept arrays at the end of a pass: what is not computed yet depends on no slot."""
        for w in self._written:
            w.base, w.whole = None, True

    def restore(self) -> None:
        for w in self._written:
            if not w.whole:
                w.cache.keys, w.cache.values = (None, None) if w.base is None else w.base
        self._snapshot.restore()
        for back in self._kept:
            back()
        for w in self._written:
            if w.overwritten is not None:
                w.overwritten.restore()
        # Evaluate, so that no array depends on a slot. If memory is short, the cache's next use says so.
        with contextlib.suppress(RuntimeError):
            mx.eval([array for w in self._written for _, array in tree_flatten(_arrays(w.cache) or [])])


class _Overwritten:
    def __init__(self, cache: RotatingKVCache) -> None:
        self.cache = cache
        self._at = cache.keep if window_index(cache) == cache.max_size else window_index(cache)
        self._was = cache.offset, window_index(cache)
        # Copies, as a slice would hold the whole window.
        self.arrays = [mx.contiguous(a[..., self._at : self._at + 1, :]) + 0 for a in (cache.keys, cache.values)]

    def restore(self) -> None:
        for array, was in zip((self.cache.keys, self.cache.values), self.arrays, strict=True):
            array[..., self._at : self._at + 1, :] = was
        self.cache.offset, index = self._was
        set_window_index(self.cache, index)


def _in_place(cache: Any) -> bool:
    """Whether this sliding window writes its next token in place, without growing."""
    if type(cache) is not RotatingKVCache or cache.keys is None:
        return False
    size = cache.keys.shape[2]
    return bool(size == cache.max_size or (size < cache.max_size and cache.offset < size))


def _arrays(cache: Any) -> Any:
    """Returns new handles of the cache's arrays: a slice assignment changes the array behind an existing one."""
    return None if cache.keys is None else tree_map(handle, (cache.keys, cache.values))


def _inner(value: Any, depth: int = 6) -> list[Any]:
    """Returns every cache in ``value`` that may be written in place, nested ones included."""
    if by_offset(value) or type(value) is RotatingKVCache:
        return [value]
    if depth == 0 or isinstance(value, mx.array | type):
        return []
    if isinstance(value, list | tuple):
        return [c for v in value for c in _inner(v, depth - 1)]
    if isinstance(value, dict):
        return [c for v in value.values() for c in _inner(v, depth - 1)]
    if hasattr(value, "__dict__") and not callable(value):
        return [c for v in vars(value).values() for c in _inner(v, depth - 1)]
    return []
