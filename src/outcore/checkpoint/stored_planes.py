"""Quantized weights of a packed copy whose codes lie in two planes, one behind the other: first all low bits, then all
high bits, in as many bytes as before. Whoever is drafted for by the high bits reads only the first part in each sweep,
its draft is the second, and nothing is on disk twice; who needs all bits joins the two (``code_planes``)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..modules.code_planes import BITS, high_words, joined, low_plane
from .checkpoint import TensorInfo

Words = NDArray[np.uint32]

CUT_BYTES = 4 << 20
"""Bytes of words that are cut at a time."""


def stored_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of the bytes that words, uint32 of this shape, are stored as."""
    return shape[0], shape[1] * 4


def could_be_cut(shape: tuple[int, ...], bits: int, high: int) -> bool:
    """Whether words of this shape are rows of whole blocks of 32 codes, of so many bits, that can be cut so."""
    known = bits in BITS and 0 < high < bits
    return known and len(shape) == 2 and min(shape) > 0 and shape[1] % bits == 0 and shape[0] * shape[1] < 1 << 30


def encoded(words: Words, bits: int, high: int) -> Iterator[memoryview]:
    """The bytes of both planes of these words (rows, n * bits / 32)."""
    step = max(1, CUT_BYTES // (words.shape[1] * 4))
    for cut in (low_plane, high_words):
        for begin in range(0, len(words), step):
            plane = cut(mx.array(words[begin : begin + step]), bits, high)
            mx.eval(plane)
            yield np.array(plane, copy=False).reshape(-1).view(np.uint8).data


@dataclass(frozen=True)
class Planes:
    """A decoder (``decoders``) of one weight's words.

    Attributes:
        shape: of the words, uint32. bits: of a code; ``high``: of these, how many are in the second plane.
    """

    shape: tuple[int, ...]
    bits: int
    high: int
    nbytes: int = 0

    @property
    def low_bytes(self) -> int:
        """Bytes of the first plane."""
        return self.shape[0] * self.shape[1] * 4 // self.bits * (self.bits - self.high)

    def decode(self, stored: mx.array) -> mx.array:
        """The words; ``stored``: uint8, as many bytes. Not evaluated."""
        rows = self.shape[0]
        flat = stored.reshape(-1)
        low, high = (
            part.view(mx.uint32).reshape(rows, -1) for part in (flat[: self.low_bytes], flat[self.low_bytes :])
        )
        return joined(high, low, self.bits, self.high)

    def places(self, stored: TensorInfo) -> tuple[TensorInfo, TensorInfo]:
        """Where the low and the high plane lie of a tensor that is stored so, each as words of its own."""
        blocks = self.shape[1] // self.bits
        low = replace(
            stored,
            name=f"{stored.name}.low",
            dtype="U32",
            shape=(self.shape[0], blocks * (self.bits - self.high)),
            nbytes=self.low_bytes,
            stored=None,
        )
        high = replace(
            low,
            name=f"{stored.name}.high",
            shape=(self.shape[0], blocks * self.high),
            offset=stored.offset + self.low_bytes,
            nbytes=stored.nbytes - self.low_bytes,
        )
        return low, high
