"""Finds arrays, caches and token counts in the arguments and results of model calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList

from .hooks import arrays_in
from .mlx_lm_compat import BaseCache


def copy_of(array: mx.array) -> mx.array:
    flat = array.reshape(-1)
    return mx.concatenate([flat[:1], flat[1:]]).reshape(array.shape) if array.size > 1 else array + 0


def handles(*values: Any) -> list[mx.array]:
    """Return every array in ``values`` as a new object, because a later layer may write into the one it receives."""
    found = arrays_in(*values)
    for i, a in enumerate(found):
        found[i] = a.astype(a.dtype)  # as ``hooks.handle``
    return found


def flat(caches: Sequence[Any]) -> list[Any]:
    return [part for c in caches for part in (flat(c.caches) if isinstance(c, CacheList) else [c])]


def caches_in(*values: Any) -> list[Any]:
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
    """Return the number of tokens in a layer's input: the product of all dimensions but the last."""
    for x in args:
        if isinstance(x, mx.array):
            return x.size // max(x.shape[-1], 1)
    return 0


def sequences_in(args: Any) -> int:
    """Return the number of sequences in a layer's input. MLX's CUDA kernels read the weights once per sequence at one
    token each."""
    x = next((a for a in args if isinstance(a, mx.array)), None)
    return x.shape[0] if x is not None and x.ndim > 2 else 1
