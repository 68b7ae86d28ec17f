"""What a model's caches look like, learnt when it is rehearsed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from .call_values import flat

PLAIN = "KVCache"
INSTEAD = {PLAIN, "QuantizedKVCache", "RotatingKVCache", "ConcatenateKVCache"}
"""What mlx-lm puts in the place of a plain one: quantized, or bounded."""

KEYED = INSTEAD | {"ChunkedKVCache"}
"""Those with keys and values of shape (1, heads, tokens, features)."""


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
    places = [at for at, c in enumerate(cache) for _ in flat([c])]
    for n, c in enumerate(flat(cache)):
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
        found.append(CacheForm(type(c).__name__, tuple(arrays), places[n]))
    return tuple(found)


def shapes_of(cache: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Path and shape of each array of a state; of keys and values that are quantized, as they would be if not."""
    if type(cache).__name__ == "QuantizedKVCache":
        for path, packed in (("0", cache.keys), ("1", cache.values)):
            if packed is not None:
                *outer, words = packed[0].shape
                yield path, (*outer, words * 32 // cache.bits)
        return
    for path, array in tree_flatten(getattr(cache, "state", ())):
        # Who has left paddings or lengths shares sweeps; whoever comes alone has none.
        if isinstance(array, mx.array) and array.size:
            yield path, tuple(array.shape)
