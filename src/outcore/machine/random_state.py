"""Preserves the caller's random state: after a seed, random numbers are the same even if something is loaded, packed or
measured before they are drawn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Restores MLX's random state after the block.

    Modules of mlx.nn draw initial weights on construction, even if they are replaced. MLX keeps one key for each thread
    (mlx/random.h, KeySequence); a seed becomes its upper and lower 32 bits.
    """
    state = random_state()
    try:
        yield
    finally:
        set_random_state(state)


def random_state() -> int:
    """Returns this thread's MLX random state as a seed."""
    state: Any = mx.random.state
    upper, lower = state[0].tolist()
    return int(upper << 32 | lower)


def set_random_state(state: int) -> None:
    mx.random.seed(state)
