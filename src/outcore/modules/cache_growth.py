"""What a model's caches hold after so many tokens, told from what they hold after a few.

mlx-lm's own caches grow by known rules, so a handful of tokens shows all there is to know. A cache of a class that is
not known here (single model files bring their own) is looked at after two longer texts, and goes on along the line
through both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from ..sizes import KV_STEP, Growing
from .hooks import arrays_in

FEW = 16
"""Tokens that show how a known cache grows. Convolutions keep fewer: what still changes after these is not known."""

PROBES = (512, 1024)
"""Tokens, and one more, after which unknown caches are looked at: one token beyond a power of two, where buffers that
grow in steps or by doubling have just grown."""


@dataclass(frozen=True)
class Growth:
    """What one cache holds. Bytes.

    Attributes:
        fixed: however long the text.
        growing: with it.
        window: per token of a chunk, until the next token comes: sliding windows keep a whole chunk beside their size.
    """

    fixed: int = 0
    growing: Growing | None = None
    window: int = 0


def cache_bytes(cache: Any) -> int:
    """Bytes of the arrays in one cache."""
    return sum(a.nbytes for a in arrays_in(cache))


def known_growth(cache: Any, before: int) -> Growth | None:
    """How a cache of mlx-lm grows that holds ``FEW`` tokens and one more; None if that cannot be told from it.

    Args:
        before: bytes that it held a token earlier.
    """
    now = cache_bytes(cache)
    if type(cache) is ArraysCache:
        return Growth(fixed=now) if now == before else None
    if type(cache) not in (KVCache, RotatingKVCache, ChunkedKVCache, QuantizedKVCache, ConcatenateKVCache):
        return None
    keys = cache.keys[0] if type(cache) is QuantizedKVCache and cache.keys is not None else cache.keys
    if not isinstance(keys, mx.array) or keys.ndim < 2 or not keys.shape[-2]:
        # A layer that uses another one's keys and values leaves its own cache empty.
        return Growth(fixed=now) if now == 0 else None
    each = now // keys.shape[-2]
    if type(cache) is RotatingKVCache:
        return Growth(growing=(each, cache.max_size), window=each)
    if type(cache) is ChunkedKVCache:
        # It is cut to its size before a chunk comes, and then grows by whole steps.
        return Growth(growing=(each, cache.chunk_size + KV_STEP), window=each)
    return Growth(growing=(each, None))


def probed_growth(first: int, second: int) -> Growth:
    """How a cache grows that held so many bytes after each of ``PROBES`` and one token more: along the line through
    both, from at least nothing."""
    a, b = PROBES
    each = max(0, -((first - second) // (b - a)))
    if not each:
        return Growth(fixed=max(first, second))
    return Growth(fixed=max(0, second - each * (b + 1)), growing=(each, None))
