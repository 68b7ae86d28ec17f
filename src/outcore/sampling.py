"""Samplers that a sequence has for itself: what it draws does not depend on who shares the sweep."""

from __future__ import annotations

import secrets
from collections.abc import Callable

import mlx.core as mx
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p


def own_sampler(
    temperature: float, *, top_p: float = 1.0, min_p: float = 0.0, top_k: int = 0, seed: int | None = None
) -> Callable[[mx.array], mx.array] | None:
    """mlx-lm's ``make_sampler`` with random numbers of its own: log-probabilities (1, vocabulary) to a token (1,).

    Args:
        temperature: 0 takes the likeliest token; None is returned for it.
        seed: of the random numbers; None: another one each time.
    """
    if temperature == 0:
        return None
    key = mx.random.key(secrets.randbits(63) if seed is None else seed % 2**63)

    def sample(logprobs: mx.array) -> mx.array:
        nonlocal key
        if 0 < top_p < 1:
            logprobs = apply_top_p(logprobs, top_p)
        if min_p > 0:
            logprobs = apply_min_p(logprobs, min_p)
        if 0 < top_k < logprobs.shape[-1]:
            logprobs = apply_top_k(logprobs, top_k)
        key, own = mx.random.split(key)
        return mx.random.categorical(logprobs * (1 / temperature), key=own)

    return sample
