"""The caller's random numbers: a seed gives the same ones whatever was loaded, packed or measured in between."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx


@contextmanager
def random_state_kept() -> Iterator[None]:
    """MLX's random numbers go on after the block as if none had been drawn in it.

    Modules of mlx.nn draw their first weights when they are made, quantized ones too, though others replace them. MLX
    keeps one key for each thread (mlx/random.h, KeySequence); that of a seed is its upper and its lower 32 bits.
    """
    state = random_state()
    try:
        yield
    finally:
        set_random_state(state)


def random_state() -> int:
    """What MLX's random numbers go on from, in this thread."""
    state: Any = mx.random.state
    upper, lower = state[0].tolist()
    return int(upper << 32 | lower)


def set_random_state(state: int) -> None:
    """Have them go on from there."""
    mx.random.seed(state)
