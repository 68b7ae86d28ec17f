"""Bytes of caches that grow with the context, as mlx-lm's grow: in steps, up to a window."""

from __future__ import annotations

from collections.abc import Sequence

KV_STEP = 256
"""Tokens by which mlx-lm's KV caches grow (``KVCache.step``)."""

SHARED_STEP = 32
"""Tokens by which caches grow of sequences that come and go: 32 short ones of an 8B model would take 1 GB more by
mlx-lm's step, in place of layers."""

Growing = tuple[int, int | None]
"""Bytes per token, and tokens at most (None: no limit)."""


def held_tokens(context: int, most: int | None = None) -> int:
    """Tokens that a cache has room for at most after ``context`` tokens and one more, in chunks of any sizes.

    A buffer grows when its ``n`` tokens are followed by ``k`` more than it has room for: to ``n``, and ``k`` rounded up
    to whole steps. That is less than a step beyond the ``n + k`` tokens that there are then.
    """
    tokens = context + KV_STEP
    return tokens if most is None else min(tokens, most)


def held_bytes(growing: Sequence[Growing], context: int) -> int:
    """Bytes of growing caches at most, after ``context`` tokens and one more."""
    return sum([each * held_tokens(context, most) for each, most in growing])
