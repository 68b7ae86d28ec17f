"""Checks whether a cache passed by the caller is one of the model's.

MLX accepts a cache of another model where shapes happen to broadcast, and the text would be wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..errors import UsageError
from .cache_form import INSTEAD, KEYED, PLAIN, CacheForm, placed, shapes_of
from .cache_rollback import is_away

# Attributes in which mlx-lm's caches keep counts and sizes.
COUNTS = ("offset", "_idx", "keep", "max_size", "start_position", "chunk_size", "bits", "group_size")

MOST = 2**31 - 1  # Most tokens that a cache can count: an MLX shape is int32.

MAKE = "make_prompt_cache(model) makes one"


def check_cache(forms: Sequence[CacheForm], cache: Sequence[Any] | None, name: str = "prompt_cache") -> None:
    """Raise an error if a cache does not match the forms of the model's caches. Evaluates no array.

    Args:
        forms: empty if unknown; then nothing is checked.
        name: how the error's message begins.

    Raises:
        UsageError: the number, classes or shapes of the caches differ, or a state is impossible.
    """
    if not forms or cache is None:
        return
    if not isinstance(cache, list | tuple):
        raise UsageError(f"{name}: a {type(cache).__name__}, not a list; {MAKE}")
    try:
        given = placed(cache)
    except (AttributeError, TypeError):
        raise UsageError(f"{name}: not a list of mlx-lm's caches; {MAKE}") from None
    if len(given) != len(forms):
        raise UsageError(
            f"{name}: {len(given)} caches, and this model has {len(forms)}: it was made with another model"
        )
    if [at for at, _ in given] != [form.at for form in forms]:
        raise UsageError(f"{name}: its caches are nested differently; {MAKE} for each layer")
    if len({id(c) for _, c in given}) < len(given):
        raise UsageError(f"{name}: it contains the same cache twice; {MAKE} for each layer")
    for n, ((_, c), form) in enumerate(zip(given, forms, strict=True)):
        if is_away(c):
            continue  # it was checked before it was offloaded
        why = _differs(c, form) or impossible(c)
        if why is not None:
            raise UsageError(f"{name}: cache {n} {why}: it was made with another model, or is damaged")


def _differs(cache: Any, form: CacheForm) -> str | None:
    kind = type(cache).__name__
    if kind != form.kind and not (form.kind == PLAIN and kind in INSTEAD):
        return f"is a {kind}, and this model has a {form.kind} there"
    try:
        shapes = dict(shapes_of(cache))
    except (AttributeError, TypeError, ValueError, LookupError, ArithmeticError):
        return "has no state that could be read"
    for path, axes in form.arrays:
        shape = shapes.get(path)
        if shape is None:
            if kind in KEYED and shapes:
                return "holds keys without values"
            continue  # the cache is empty
        if len(shape) != len(axes) or any(b is not None and a != b for a, b in zip(shape, axes, strict=True)):
            here = "x".join("n" if b is None else str(b) for b in axes)
            return f"has a state of shape {'x'.join(map(str, shape))}, and this model has {here} there"
    return None


def impossible(cache: Any) -> str | None:
    """Return why a cache's counts contradict its contents, for an error; None if they do not."""
    kind, counts = type(cache).__name__, {name: getattr(cache, name, 0) for name in COUNTS}
    # Caches of a model's own class may count the tokens of several sequences in arrays.
    numbers = [n for n in counts.values() if kind in KEYED or not isinstance(n, mx.array)]
    if any(type(n) is not int or not 0 <= n <= MOST for n in numbers):
        return "has a token count that is not a number of tokens"
    if kind not in KEYED:
        return None
    shapes = [shape for _, shape in shapes_of(cache)]
    if any(len(shape) != 4 for shape in shapes) or len({shape[2] for shape in shapes}) > 1 or len(shapes) == 1:
        return "holds more keys than values"
    rotating, room = kind == "RotatingKVCache", shapes[0][2] if shapes else 0
    used = counts["_idx"] if rotating else counts["offset"] - counts["start_position"]
    if not 0 <= used <= room or (rotating and counts["max_size"] < 1):
        return f"counts {used} tokens and has room for {room}"
    return None
