"""A linear layer whose high bits are in memory anyway, as a draft's weights, so that only the low ones are read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .code_planes import joined, low_plane

LOW = "low"
"""The parameter that is read from disk."""


@dataclass
class Coarse:
    """What stays in memory of a layer's codes: the draft's weights.

    Attributes:
        words: uint32 (rows, n * high / 32), the high bits.
        scales: (rows, n / group size), 2 ** low times those of the layer, in the dtype that it is computed in.
    """

    words: mx.array
    scales: mx.array


class NestedLinear(nn.QuantizedLinear):
    """The same product as a ``QuantizedLinear`` whose codes are put together for each call.

    Its parameters are ``low``, uint32 (rows, n * low / 32), the low bits of the codes, and ``biases``, and ``bias`` if
    there is one. The rest, ``coarse``, is another module's; until it is there, products are of numbers that are none.
    """

    def __call__(self, x: mx.array) -> mx.array:
        rows: Any = self.__dict__.get("_outcore_rows")
        out = self._part(x, None) if rows is None else rows.product(self[LOW].shape[0], lambda s: self._part(x, s))
        return out + self["bias"] if "bias" in self else out

    def _part(self, x: mx.array, rows: slice | None) -> mx.array:
        arrays = self.whole(rows)
        return mx.quantized_matmul(
            x, *arrays, transpose=True, group_size=self.group_size, bits=self.bits, mode=self.mode
        )

    def whole(self, rows: slice | None = None) -> tuple[mx.array, mx.array, mx.array]:
        """Words, scales and biases as the ``QuantizedLinear`` has them, all of them or of some rows; not evaluated."""
        low, biases, low_bits = self[LOW], self["biases"], self.bits - self.high
        if rows is not None:
            low, biases = low[rows], biases[rows]
        if (coarse := self.coarse) is None:
            shape = (*low.shape[:-1], low.shape[-1] // low_bits * self.bits)
            return mx.broadcast_to(low[..., :1], shape), biases * mx.nan, biases
        words, scales = (coarse.words, coarse.scales) if rows is None else (coarse.words[rows], coarse.scales[rows])
        # A power of two: what the draft multiplied with goes without a trace.
        return joined(words, low, self.bits, self.high), scales * 2**-low_bits, biases

    def _extra_repr(self) -> str:
        rows, words = self[LOW].shape if self[LOW].ndim == 2 else (0, 0)
        columns = words * 32 // (self.bits - self.high)
        return f"input_dims={columns}, output_dims={rows}, bits={self.bits}, of them high={self.high}"

    @property
    def coarse(self) -> Coarse | None:
        """The high bits, and the draft's scales."""
        found: Coarse | None = self.__dict__["_outcore_coarse"]
        return found

    @coarse.setter
    def coarse(self, coarse: Coarse) -> None:
        self.__dict__["_outcore_coarse"] = coarse

    @property
    def joined_bytes(self) -> int:
        """Bytes of the codes that are put together for a call."""
        return int(self[LOW].nbytes // (self.bits - self.high) * self.bits)

    @property
    def high(self) -> int:
        """Bits of each code that are in memory."""
        return int(self.__dict__["_outcore_high"])


def nest(module: nn.QuantizedLinear, high: int) -> None:
    """Make a quantized layer one of whose codes only the low bits are its own: those below the ``high`` highest."""
    low = low_plane(module.weight, module.bits, high)
    dict.__delitem__(module, "weight")
    dict.__delitem__(module, "scales")
    module[LOW] = low
    module.__dict__["_outcore_coarse"], module.__dict__["_outcore_high"] = None, high
    module.__class__ = NestedLinear
