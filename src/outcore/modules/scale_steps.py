"""Scales of 4-bit weights in a quarter of their bytes, exactly, where they follow from the biases.

``mx.quantize`` takes each group's largest weight, by magnitude, as its bias, and as its scale that weight over a whole
number of steps, ``bias / -steps``, so that zero is one of its codes. With 4 bits there are 7 to 15 steps where a group
has weights of both signs. A group of zeros alone has a scale of its own, which the steps 0 stand for.

Only for bfloat16: a quotient of a bfloat16 and a number below 16 is never closer than 2 ** -13 of itself to where
rounding changes, so that any device's division in float32 gives the same one, however it rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

BITS = 4
MOST_STEPS = 15
OF_ZEROS = 0xB3D7
"""-1e-7 as a bfloat16's 16 bits: the scale of a group of zeros."""

SMALLEST = np.float32(2.0**-120)
"""Scales below this are left as they are: devices may take the smallest numbers for zero."""

Words = NDArray[np.uint16]


def stored_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of the bytes that scales of this shape are stored as."""
    return shape[0], (shape[1] + 1) // 2


def steps_of(scales: Words, biases: Words) -> NDArray[np.uint8] | None:
    """The steps of each group, two to a byte, from bfloat16 scales and biases given as their 16 bits; None: not all
    scales follow from them."""
    scale, bias = _floats(scales), _floats(biases)
    of_zeros = (scales == OF_ZEROS) & (biases == 0)
    with np.errstate(all="ignore"):
        found = np.rint(-bias / scale)
    if not np.all(of_zeros | ((found >= 1) & (found <= MOST_STEPS) & (np.abs(scale) >= SMALLEST))):
        return None
    steps = np.where(of_zeros, np.float32(1), found).astype(np.float32)
    if not np.all(of_zeros | (_rounded(bias / -steps) == scales)):
        return None
    whole = np.zeros((scales.shape[0], stored_shape(scales.shape)[1] * 2), np.uint8)
    whole[:, : scales.shape[1]] = np.where(of_zeros, 0, steps)
    return (whole[:, 0::2] | whole[:, 1::2] << 4).astype(np.uint8)


def scales_of(steps: mx.array, biases: mx.array) -> mx.array:
    """The scales, bfloat16; not evaluated."""
    return _scales()(steps, biases)


@cache
def _scales() -> Callable[[mx.array, mx.array], mx.array]:
    def scales(steps: mx.array, biases: mx.array) -> mx.array:
        groups = biases.shape[-1]
        each = mx.stack([steps & 0xF, steps >> 4], axis=-1).reshape(steps.shape[0], -1)[:, :groups]
        of_zeros = each == 0
        quotients = biases.astype(mx.float32) / -mx.where(of_zeros, 1, each).astype(mx.float32)
        small = mx.array(OF_ZEROS, mx.uint16).view(mx.bfloat16)
        return mx.where(of_zeros, small, quotients.astype(mx.bfloat16))

    return scales


def _floats(words: Words) -> NDArray[np.float32]:
    return (words.astype(np.uint32) << 16).view(np.float32)


def _rounded(values: NDArray[np.float32]) -> Words:
    """The nearest bfloat16, to even at ties; of numbers."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
