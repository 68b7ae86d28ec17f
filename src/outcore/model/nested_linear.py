"""A linear layer whose high bits are in memory anyway, as a draft's weights, so that only the low ones are read."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .code_planes import high_plane, joined, low_plane

LOW = "low"
"""The parameter that is read from disk."""


class NestedLinear(nn.QuantizedLinear):
    """The same product as a ``QuantizedLinear`` whose codes are put together for each call, or once where it stays.

    Its parameters are ``low``, uint32 (rows, n * low / 32), the low bits of the codes, and ``biases``, and ``bias`` if
    there is one. The rest is ``coarse``, the draft's module: its weight has the high bits, its scales are 2 ** low
    times those of this one. Until it is there, products are of numbers that are none. While all of the codes stay in
    memory (``settle``) they are the draft's weight, which is as good as this one then, and ``low`` is empty.
    """

    def __call__(self, x: mx.array) -> mx.array:
        rows: Any = self.__dict__.get("_outcore_rows")
        out = self._part(x, None) if rows is None else rows.product(self["biases"].shape[0], lambda s: self._part(x, s))
        return out + self["bias"] if "bias" in self else out

    def _part(self, x: mx.array, rows: slice | None) -> mx.array:
        arrays = self.whole(rows)
        return mx.quantized_matmul(
            x, *arrays, transpose=True, group_size=self.group_size, bits=self.bits, mode=self.mode
        )

    def whole(self, rows: slice | None = None) -> tuple[mx.array, mx.array, mx.array]:
        """Words, scales and biases as the ``QuantizedLinear`` has them, all of them or of some rows; not evaluated."""
        low, biases, low_bits, coarse = self[LOW], self["biases"], self.bits - self.high, self.coarse
        if coarse is None:
            low, biases = (low, biases) if rows is None else (low[rows], biases[rows])
            shape = (*low.shape[:-1], low.shape[-1] // low_bits * self.bits)
            return mx.broadcast_to(low[..., :1], shape), biases * mx.nan, biases
        arrays = [coarse.weight, coarse.scales, biases, low]
        if self.settled:
            arrays.pop()
        words, scales, biases, *lows = arrays if rows is None else [a[rows] for a in arrays]
        if not lows:
            return words, scales, biases
        # A power of two: what the draft multiplied with goes without a trace.
        return joined(words, lows[0], self.bits, self.high), scales * 2**-low_bits, biases

    @property
    def settled(self) -> bool:
        """Whether the codes have been put together, and stay in memory."""
        return self.coarse is not None and self.coarse.bits == self.bits

    def settle(self) -> None:
        """Put the codes together once, as ``low`` is in memory and stays there: the draft's weights are these now."""
        if (coarse := self.coarse) is None or self.settled or not self[LOW].size:
            return
        arrays = self.whole()
        mx.eval(arrays)
        coarse.weight, coarse.scales, coarse.biases = arrays
        coarse.bits = self.bits
        self[LOW] = mx.zeros((0,), mx.uint32)

    def unsettle(self) -> None:
        """The draft has the high bits alone again; ``low`` is to be read."""
        if (coarse := self.coarse) is None or not self.settled:
            return
        arrays = high_plane(coarse.weight, coarse.scales, coarse.biases, self.bits, self.high)
        mx.eval(arrays)
        coarse.weight, coarse.scales, coarse.biases = arrays
        coarse.bits = self.high

    def _extra_repr(self) -> str:
        columns, rows = self["biases"].shape[-1] * self.group_size, self["biases"].shape[0]
        return f"input_dims={columns}, output_dims={rows}, bits={self.bits}, of them high={self.high}"

    @property
    def coarse(self) -> nn.QuantizedLinear | None:
        """The draft's module."""
        found: nn.QuantizedLinear | None = self.__dict__["_outcore_coarse"]
        return found

    def share(self, coarse: nn.QuantizedLinear) -> None:
        """Use the high bits of the draft's module. (Not a setter: modules keep those that are assigned.)"""
        self.__dict__["_outcore_coarse"] = coarse

    @property
    def joined_bytes(self) -> int:
        """Bytes of the codes that are put together for a call."""
        return int(self["biases"].size * self.group_size * self.bits // 8)

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
