"""Quantized weights of a packed copy whose codes lie in two planes, one behind the other: first all low bits, then all
high bits, in as many bytes as before. Whoever is drafted for by the high bits reads only the first part in each pass,
its draft is the second, and nothing is on disk twice; who needs all bits joins the two (``code_planes``)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from outcore.checkpoint.checkpoint import TensorInfo
from outcore.checkpoint.manifest import Coded
from outcore.modules.layers import Layer
from outcore.modules.module_tree import named_modules

from .code_planes import BITS, high_words, joined, low_plane

ENOUGH = 0.75
"""Of a layer's bytes, those whose codes are cut; what else it has stays in memory."""

CUT_BYTES = 4 << 20
"""Bytes of words that are cut at a time."""


def could_be_cut(shape: tuple[int, ...], bits: int, high: int) -> bool:
    """Whether words of this shape are rows of whole blocks of 32 codes, of so many bits, that can be cut so."""
    known = bits in BITS and 0 < high < bits
    return known and len(shape) == 2 and min(shape) > 0 and shape[1] % bits == 0 and shape[0] * shape[1] < 1 << 30


def cut_modules(layer: Layer, high: int) -> list[tuple[str, nn.QuantizedLinear]]:
    """The modules of a layer, by their paths in it, whose codes have more than ``high`` bits to be cut into; none
    where they are too small a part of it."""
    found = {id(m): (path, m) for path, m in named_modules(layer.module) if _can_be_cut(m, high)}
    nbytes = sum(m.weight.nbytes + m.scales.nbytes + m.biases.nbytes for _, m in found.values())
    return list(found.values()) if nbytes >= ENOUGH * layer.nbytes else []


def _can_be_cut(module: nn.Module, high: int) -> bool:
    if type(module) is not nn.QuantizedLinear or module.mode != "affine" or module.bits <= high:
        return False
    # Of float16 the draft's scales might have no room for a power of two.
    whole = module.weight.ndim == 2 and module.weight.dtype == mx.uint32 and module.weight.shape[0] > 1
    return whole and module.scales.dtype != mx.float16


@dataclass(frozen=True)
class Planes:
    """How one weight's words are stored, and its decoder (``Decoder``).

    Attributes:
        shape: of the words, uint32. bits: of a code; ``high``: of these, how many are in the second plane.
    """

    shape: tuple[int, ...]
    bits: int
    high: int
    nbytes: int = 0

    dtype: ClassVar[str] = "U32"
    words: ClassVar[str] = "<u4"
    stored: ClassVar[None] = None

    @classmethod
    def found(cls, stored: tuple[int, ...], coded: Coded, _: Any) -> Planes:
        rows, columns = stored
        shape = rows, columns // 4
        if not could_be_cut(shape, coded.bits, coded.high):
            raise ValueError("of another form")
        return cls(shape, coded.bits, coded.high)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Of the bytes that the words are stored as."""
        return self.shape[0], self.shape[1] * 4

    def encoded(self, words: Any) -> Iterator[memoryview]:
        """The bytes of both planes of these words, uint32 in NumPy's memory."""
        step = max(1, CUT_BYTES // (words.shape[1] * 4))
        for cut in (low_plane, high_words):
            for begin in range(0, len(words), step):
                plane = cut(mx.array(words[begin : begin + step]), self.bits, self.high)
                mx.eval(plane)
                yield np.array(plane, copy=False).reshape(-1).view(np.uint8).data

    @property
    def low_bytes(self) -> int:
        """Bytes of the first plane."""
        return self.shape[0] * self.shape[1] * 4 // self.bits * (self.bits - self.high)

    def decode(self, stored: mx.array) -> mx.array:
        """The words; ``stored``: uint8, as many bytes. Not evaluated."""
        flat = stored.reshape(-1)
        parts = (flat[self.low_bytes :], flat[: self.low_bytes])
        high, low = (part.view(mx.uint32).reshape(self.shape[0], -1) for part in parts)
        return joined(high, low, self.bits, self.high)

    def places(self, stored: TensorInfo) -> tuple[TensorInfo, TensorInfo]:
        """Where the low and the high plane lie of a tensor that is stored so, each as words of its own."""
        (rows, words), low = self.shape, self.low_bytes
        blocks = words // self.bits
        lows, highs = (rows, blocks * (self.bits - self.high)), (rows, blocks * self.high)
        file, begin, left = stored.file, stored.offset + low, stored.nbytes - low
        return (
            TensorInfo(f"{stored.name}.low", file, "U32", lows, stored.offset, low),
            TensorInfo(f"{stored.name}.high", file, "U32", highs, begin, left),
        )
