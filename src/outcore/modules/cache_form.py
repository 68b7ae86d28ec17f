"""What is known of a model's caches: what they look like, whether a cache that somebody brings is one of them, and what
they hold after so many tokens.

A cache of another model is no error to MLX where shapes happen to broadcast: it would be read, and make other text.

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

from ..errors import UsageError
from ..sizes import KV_STEP, Growing
from .cache_rollback import is_away
from .call_values import flat
from .hooks import arrays_in

PLAIN = "KVCache"
INSTEAD = {PLAIN, "QuantizedKVCache", "RotatingKVCache", "ConcatenateKVCache"}
"""What mlx-lm puts in the place of a plain one: quantized, or bounded."""

KEYED = INSTEAD | {"ChunkedKVCache"}
"""Those with keys and values of shape (1, heads, tokens, features)."""

COUNTS = ("offset", "_idx", "keep", "max_size", "start_position", "chunk_size", "bits", "group_size")
"""Attributes in which mlx-lm's caches count tokens and others."""

MOST = 2**31 - 1
"""Tokens: an MLX shape is int32."""

FEW = 16
"""Tokens that show how a known cache grows. Convolutions keep fewer: what still changes after these is not known."""

PROBES = (512, 1024)
"""Tokens, and one more, after which unknown caches are looked at: one token beyond a power of two, where buffers that
grow in steps or by doubling have just grown."""

MAKE = "make_prompt_cache(model) makes one"


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
    for n, (at, c) in enumerate(_placed(cache)):
        earlier = dict(before[n].arrays) if before else {}
        arrays = []
        for path, shape in _shapes(c):
            old = earlier.get(path, shape)
            axes = [a if a == b else None for a, b in zip(shape, old, strict=False)]
            if type(c).__name__ in KEYED:
                axes[2] = None
            elif not known:
                axes[1:-1] = [None] * len(axes[1:-1])
            arrays.append((path, tuple(axes) if len(old) == len(shape) else (None,) * len(shape)))
        found.append(CacheForm(type(c).__name__, tuple(arrays), at))
    return tuple(found)


def check_cache(forms: Sequence[CacheForm], cache: Sequence[Any] | None, name: str = "prompt_cache") -> None:
    """Refuse a cache that is not of the model whose caches have these forms. Nothing is computed.

    Args:
        forms: none: nothing is known of them. ``cache``: None: there is none.
        name: for the error.

    Raises:
        UsageError: another number, other classes or other shapes; or a state that no text leaves behind.
    """
    if not forms or cache is None:
        return
    if not isinstance(cache, list | tuple):
        raise UsageError(f"{name}: a {type(cache).__name__}, not a list; {MAKE}")
    try:
        given = _placed(cache)
    except (AttributeError, TypeError):
        raise UsageError(f"{name}: not a list of mlx-lm's caches; {MAKE}") from None
    if len(given) != len(forms):
        raise UsageError(
            f"{name}: {len(given)} caches, and this model has {len(forms)}: it was made with another model"
        )
    if [at for at, _ in given] != [form.at for form in forms]:
        raise UsageError(f"{name}: its caches are nested otherwise; {MAKE} for each layer")
    if len({id(c) for _, c in given}) < len(given):
        raise UsageError(f"{name}: the same cache stands in it twice; {MAKE} for each layer")
    for n, ((_, c), form) in enumerate(zip(given, forms, strict=True)):
        if is_away(c):
            continue  # it was looked at before it was put away
        why = _differs(c, form) or impossible(c)
        if why is not None:
            raise UsageError(f"{name}: cache {n} {why}: it was made with another model, or is damaged")


def _placed(cache: Sequence[Any]) -> list[tuple[int, Any]]:
    """Every cache, in place of lists of them what they hold, and the number of what it is a part of."""
    return [(at, part) for at, c in enumerate(cache) for part in flat([c])]


def _differs(cache: Any, form: CacheForm) -> str | None:
    kind = type(cache).__name__
    if kind != form.kind and not (form.kind == PLAIN and kind in INSTEAD):
        return f"is a {kind}, and this model has a {form.kind} there"
    try:
        shapes = dict(_shapes(cache))
    except (AttributeError, TypeError, ValueError, LookupError, ArithmeticError):
        return "has no state that could be read"
    for path, axes in form.arrays:
        shape = shapes.get(path)
        if shape is None:
            if kind in KEYED and shapes:
                return "holds keys without values"
            continue  # nothing is in it yet
        if len(shape) != len(axes) or any(b is not None and a != b for a, b in zip(shape, axes, strict=True)):
            here = "x".join("n" if b is None else str(b) for b in axes)
            return f"has a state of shape {'x'.join(map(str, shape))}, and this model has {here} there"
    return None


def impossible(cache: Any) -> str | None:
    """Why the counts that a cache keeps do not fit to what it holds; None: they do."""
    kind, counts = type(cache).__name__, {name: getattr(cache, name, 0) for name in COUNTS}
    # A model's own caches may count several sequences' tokens in arrays.
    told = [n for n in counts.values() if kind in KEYED or not isinstance(n, mx.array)]
    if any(type(n) is not int or not 0 <= n <= MOST for n in told):
        return "counts tokens with what is no count"
    if kind not in KEYED:
        return None
    shapes = [shape for _, shape in _shapes(cache)]
    if any(len(shape) != 4 for shape in shapes) or len({shape[2] for shape in shapes}) > 1 or len(shapes) == 1:
        return "holds more keys than values"
    rotating, room = kind == "RotatingKVCache", shapes[0][2] if shapes else 0
    used = counts["_idx"] if rotating else counts["offset"] - counts["start_position"]
    if not 0 <= used <= room or (rotating and counts["max_size"] < 1):
        return f"counts {used} tokens and has room for {room}"
    return None


def _shapes(cache: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
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
