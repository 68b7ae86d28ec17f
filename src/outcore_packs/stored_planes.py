"""Stores quantized weights as two planes: first all low bits, then all high bits, in as many bytes as before.

A model that drafts with the high bits keeps them in memory and streams only the low bits. Nothing is on disk twice, and
both planes joined give all bits (``code_planes``).
"""

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

# The least part of a layer's bytes whose codes must be cut for planes to pay; the rest of the layer stays in memory.
ENOUGH = 0.75

CUT_BYTES = 4 << 20  # Bytes of words that are cut at a time.


def could_be_cut(shape: tuple[int, ...], bits: int, high: int) -> bool:
    """Whether words of this shape are rows of whole blocks of 32 codes that can be cut so."""
    known = bits in BITS and 0 < high < bits
    return known and len(shape) == 2 and min(shape) > 0 and shape[1] % bits == 0 and shape[0] * shape[1] < 1 << 30


def cut_modules(layer: Layer, high: int) -> list[tuple[str, nn.QuantizedLinear]]:
    """Return a layer's modules, with their paths, whose codes have more than ``high`` bits; none if they are too small
    a part."""
    found = {id(m): (path, m) for path, m in named_modules(layer.module) if _can_be_cut(m, high)}
    nbytes = sum(m.weight.nbytes + m.scales.nbytes + m.biases.nbytes for _, m in found.values())
    return list(found.values()) if nbytes >= ENOUGH * layer.nbytes else []


def _can_be_cut(module: nn.Module, high: int) -> bool:
    if type(module) is not nn.QuantizedLinear or module.mode != "affine" or module.bits <= high:
        return False
    # float16 scales, multiplied by a power of two for the draft, might overflow.
    whole = module.weight.ndim == 2 and module.weight.dtype == mx.uint32 and module.weight.shape[0] > 1
    return whole and module.scales.dtype != mx.float16


@dataclass(frozen=True)
class Planes:
    """Decodes one weight.

    Attributes:
        shape: of the words, uint32.
        bits: of a code; ``high``: of these, the number in the second plane.
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
        return self.shape[0], self.shape[1] * 4

    def encoded(self, words: Any) -> Iterator[memoryview]:
        step = max(1, CUT_BYTES // (words.shape[1] * 4))
        for cut in (low_plane, high_words):
            for begin in range(0, len(words), step):
                plane = cut(mx.array(words[begin : begin + step]), self.bits, self.high)
                mx.eval(plane)
                yield np.array(plane, copy=False).reshape(-1).view(np.uint8).data

    @property
    def low_bytes(self) -> int:
        return self.shape[0] * self.shape[1] * 4 // self.bits * (self.bits - self.high)

    def decode(self, stored: mx.array) -> mx.array:
        """Return the words, not evaluated; ``stored``: uint8, as many bytes."""
        flat = stored.reshape(-1)
        parts = (flat[self.low_bytes :], flat[: self.low_bytes])
        high, low = (part.view(mx.uint32).reshape(self.shape[0], -1) for part in parts)
        return joined(high, low, self.bits, self.high)

    def places(self, stored: TensorInfo) -> tuple[TensorInfo, TensorInfo]:
        """Return the places of the low and the high plane of a stored tensor, each as words."""
        (rows, words), low = self.shape, self.low_bytes
        blocks = words // self.bits
        lows, highs = (rows, blocks * (self.bits - self.high)), (rows, blocks * self.high)
        file, begin, left = stored.file, stored.offset + low, stored.nbytes - low
        return (
            TensorInfo(f"{stored.name}.low", file, "U32", lows, stored.offset, low),
            TensorInfo(f"{stored.name}.high", file, "U32", highs, begin, left),
        )
