"""The forms of a model's caches, and how many bytes they hold after any number of tokens.

mlx-lm's own caches grow by known rules, so a pass over a few tokens shows how much. A cache of an unknown class (some
model files define their own) is measured after two longer texts and extrapolated linearly.
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
from .hooks import arrays_in, flat

PLAIN = "KVCache"
# Classes that mlx-lm puts in place of a plain cache: quantized or bounded.
INSTEAD = {PLAIN, "QuantizedKVCache", "RotatingKVCache", "ConcatenateKVCache"}

KEYED = INSTEAD | {"ChunkedKVCache"}  # Classes with keys and values of shape (1, heads, tokens, features).

# Tokens after which known caches are measured. Convolutions keep fewer, so by then their states have their final size.
FEW = 16

# Unknown caches are measured after so many tokens and one more: just beyond a power of two, where buffers that grow in
# steps or by doubling have just grown.
PROBES = (512, 1024)


@dataclass(frozen=True)
class CacheForm:
    """The form of one cache of a model.

    Attributes:
        kind: name of its class.
        arrays: path and shape of each array in its state; None for an axis that depends on the text.
        at: its index in the model's list of caches; for a part of a ``CacheList``, the index of that list.
    """

    kind: str
    arrays: tuple[tuple[str, tuple[int | None, ...]], ...]
    at: int = 0


def forms_of(cache: Sequence[Any], before: Sequence[CacheForm] = (), *, known: bool = False) -> tuple[CacheForm, ...]:
    """Return the forms of a model's non-empty caches.

    Args:
        before: their forms after fewer tokens; axes that have changed since depend on the text.
        known: all other axes are fixed; if False, only the first and last are, in caches without keys and values.
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
    """Return (index in ``cache``, cache) for every cache; the parts of a ``CacheList`` have the list's index."""
    return [(at, part) for at, c in enumerate(cache) for part in flat([c])]


def shapes_of(cache: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield path and shape of each array of a cache's state; of quantized arrays, the shape before quantizing."""
    if type(cache).__name__ == "QuantizedKVCache":
        for path, packed in (("0", cache.keys), ("1", cache.values)):
            if packed is not None:
                *outer, words = packed[0].shape
                yield path, (*outer, words * 32 // cache.bits)
        return
    for path, array in tree_flatten(getattr(cache, "state", ())):
        # A single sequence has empty left paddings and lengths. Values may be of width 0, where only keys are needed.
        if isinstance(array, mx.array) and (array.size or (array.ndim > 1 and all(array.shape[:-1]))):
            yield path, tuple(array.shape)


@dataclass(frozen=True)
class Growth:
    """Bytes that one cache takes.

    Attributes:
        fixed: bytes that do not depend on the text.
        growing: bytes per token, and the most tokens kept (None: no limit).
        window: bytes per token of a prompt's last chunk: a sliding window keeps all of it until the next token.
    """

    fixed: int = 0
    growing: Growing | None = None
    window: int = 0


def cache_bytes(cache: Any) -> int:
    return sum(a.nbytes for a in arrays_in(cache))


def known_growth(cache: Any, before: int) -> Growth | None:
    """Return how a cache of a known class grows, from its state after ``FEW`` tokens and one more; None if unknown.

    Args:
        before: its bytes one token earlier.
    """
    now = cache_bytes(cache)
    if type(cache) is ArraysCache:
        return Growth(fixed=now) if now == before else None
    if type(cache) not in (KVCache, RotatingKVCache, ChunkedKVCache, QuantizedKVCache, ConcatenateKVCache):
        return None
    keys = cache.keys[0] if type(cache) is QuantizedKVCache and cache.keys is not None else cache.keys
    if not isinstance(keys, mx.array) or keys.ndim < 2 or not keys.shape[-2]:
        # A layer that attends to another layer's keys and values leaves its own cache empty.
        return Growth(fixed=now) if now == 0 else None
    each = now // keys.shape[-2]
    if type(cache) is RotatingKVCache:
        return Growth(growing=(each, cache.max_size), window=each)
    if type(cache) is ChunkedKVCache:
        # Before each chunk mlx-lm cuts it to ``chunk_size`` tokens; then it grows by whole steps.
        return Growth(growing=(each, cache.chunk_size + KV_STEP), window=each)
    return Growth(growing=(each, None))


def probed_growth(first: int, second: int) -> Growth:
    """Extrapolate linearly from a cache's bytes after ``PROBES[0]`` + 1 and ``PROBES[1]`` + 1 tokens."""
    a, b = PROBES
    each = max(0, -((first - second) // (b - a)))
    if not each:
        return Growth(fixed=max(first, second))
    return Growth(fixed=max(0, second - each * (b + 1)), growing=(each, None))
