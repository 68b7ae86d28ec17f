"""What is known of a model's caches: what they look like, and what they hold after so many tokens.

mlx-lm's own caches grow by known rules, so a handful of tokens shows all there is to know. A cache of a class that is
not known here (single model files bring their own) is looked at after two longer texts, and goes on along the line
through both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import (
    ArraysCache,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from ..sizes import KV_STEP, Growing
from .call_values import flat
from .hooks import arrays_in

PLAIN = "KVCache"
INSTEAD = {PLAIN, "QuantizedKVCache", "RotatingKVCache", "ConcatenateKVCache"}
"""What mlx-lm puts in the place of a plain one: quantized, or bounded."""

KEYED = INSTEAD | {"ChunkedKVCache"}
"""Those with keys and values of shape (1, heads, tokens, features)."""

FEW = 16
"""Tokens that show how a known cache grows. Convolutions keep fewer: what still changes after these is not known."""

PROBES = (512, 1024)
"""Tokens, and one more, after which unknown caches are looked at: one token beyond a power of two, where buffers that
grow in steps or by doubling have just grown."""


@dataclass(frozen=True)
class CacheForm:
    """One cache of a model: its class, each array of its state by its axes (None: one that the text changes), and which
    of the caches in the model's list it is, or is a part of."""

    kind: str
    arrays: tuple[tuple[str, tuple[int | None, ...]], ...]
    at: int = 0


def forms_of(cache: Sequence[Any], before: Sequence[CacheForm] = (), *, known: bool = False) -> tuple[CacheForm, ...]:
    """The forms of a model's caches that hold something.

    Args:
        before: the same with fewer tokens.
        known: whether it is known from there which axes the text changes; if not, only the outer ones are kept.
    """
    found = []
    for n, (at, c) in enumerate(placed(cache)):
        earlier = dict(before[n].arrays) if before else {}
        arrays = []
        for path, shape in shapes_of(c):
            old = earlier.get(path, shape)
            axes = [a if a == b else None for a, b in zip(shape, old, strict=False)]
            if type(c).__name__ in KEYED:
                axes[2] = None
            elif not known:
                axes[1:-1] = [None] * len(axes[1:-1])
            arrays.append((path, tuple(axes) if len(old) == len(shape) else (None,) * len(shape)))
        found.append(CacheForm(type(c).__name__, tuple(arrays), at))
    return tuple(found)


def placed(cache: Sequence[Any]) -> list[tuple[int, Any]]:
    """Every cache, in place of lists of them what they hold, and the number of what it is a part of."""
    return [(at, part) for at, c in enumerate(cache) for part in flat([c])]


def shapes_of(cache: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Path and shape of each array of a state; of keys and values that are quantized, as they would be if not."""
    if type(cache).__name__ == "QuantizedKVCache":
        for path, packed in (("0", cache.keys), ("1", cache.values)):
            if packed is not None:
                *outer, words = packed[0].shape
                yield path, (*outer, words * 32 // cache.bits)
        return
    for path, array in tree_flatten(getattr(cache, "state", ())):
        # Who has left paddings or lengths shares passes; whoever comes alone has none.
        if isinstance(array, mx.array) and array.size:
            yield path, tuple(array.shape)


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
