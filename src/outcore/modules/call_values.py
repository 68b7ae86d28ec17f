"""What a model's calls are given and give back, as the engine sees it: arrays, caches, tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList

from .hooks import arrays_in
from .mlx_lm_compat import BaseCache


def copy_of(array: mx.array) -> mx.array:
    """The same bits in memory of their own."""
    flat = array.reshape(-1)
    return mx.concatenate([flat[:1], flat[1:]]).reshape(array.shape) if array.size > 1 else array + 0


def handles(*values: Any) -> list[mx.array]:
    """Every array in ``values`` by a handle of our own: a later layer may write into the one that it was given."""
    found = arrays_in(*values)
    for i, a in enumerate(found):
        found[i] = a.astype(a.dtype)  # as ``hooks.handle``
    return found


def flat(caches: Sequence[Any]) -> list[Any]:
    """Every cache of a model, in place of lists of them what they hold."""
    return [part for c in caches for part in (flat(c.caches) if isinstance(c, CacheList) else [c])]


def caches_in(*values: Any) -> list[Any]:
    """Every cache in ``values``, those inside of others too."""
    found: list[Any] = []
    for v in values:
        if isinstance(v, list | tuple):
            found += caches_in(*v)
        elif isinstance(v, dict):
            found += caches_in(*v.values())
        elif isinstance(v, CacheList):
            found += caches_in(*v.caches)
        elif isinstance(v, BaseCache):
            found.append(v)
    return found


def tokens_in(args: Any) -> int:
    """Tokens in a layer's input: the product of all dimensions but the last."""
    for x in args:
        if isinstance(x, mx.array):
            return x.size // max(x.shape[-1], 1)
    return 0


def sequences_in(args: Any) -> int:
    """Sequences in a layer's input. MLX's CUDA kernels for one token of each read the weights once for every one."""
    x = next((a for a in args if isinstance(a, mx.array)), None)
    return x.shape[0] if x is not None and x.ndim > 2 else 1
