"""Linear layers whose high bits are in memory, shared with a draft, so that only the low bits are read."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from outcore_packs.stored_planes import high_plane, joined, low_plane, middle

# The parameter that is read from disk.
LOW = "low"

# Bytes of codes that are cut at a time when memory is short; meanwhile cutting takes 7 to 24 times as many bytes.
CUT_BYTES = 1 << 17


class CoarseLinear(nn.QuantizedLinear):
    """A draft's linear layer: has the high bits of a model's codes, or all bits if the model's layer stays in memory.

    ``weight`` and ``scales`` (the model's times 2 ** number of low bits) are its own. ``biases`` are the model's; those
    of the high bits are computed from them in each call, so that nothing is in memory twice.

    Attributes:
        all_bits: bits of the model's codes.
    """

    all_bits: int

    def __call__(self, x: mx.array) -> mx.array:
        rows: Any = self.__dict__.get("_outcore_rows")
        out = self._part(x, None) if rows is None else rows.product(self["biases"].shape[0], lambda s: self._part(x, s))
        return out + self["bias"] if "bias" in self else out

    def _part(self, x: mx.array, rows: slice | None) -> mx.array:
        arrays = self.whole(rows)
        return mx.quantized_matmul(
            x, *arrays, transpose=True, group_size=self.group_size, bits=self.bits, mode=self.mode
        )

    @property
    def outcore_split(self) -> tuple[int, int]:
        """Numbers of rows and of weights, for ``split_rows``."""
        return self["biases"].shape[0], self["biases"].size * self.group_size

    def whole(self, rows: slice | None = None) -> tuple[mx.array, mx.array, mx.array]:
        """Returns the words, scales and biases to multiply with, of all rows or some; not evaluated."""
        words, scales, biases = self._own(rows)
        low = self.all_bits - self.bits
        return words, scales, middle(scales, biases, low) if low else biases

    def _own(self, rows: slice | None) -> list[mx.array]:
        arrays = [self["weight"], self["scales"], self["biases"]]
        return arrays if rows is None else [a[rows] for a in arrays]


class NestedLinear(CoarseLinear):
    """A ``QuantizedLinear`` that reads only low bits; codes are joined in each call, or once if they stay in memory.

    Its parameters are ``low``, uint32 (rows, n * low / 32), the low bits of the codes, ``biases``, and ``bias`` if any.
    The high bits and scales are in ``coarse``, the draft's module; until that is shared the output is NaN. Once all
    codes stay in memory (``settle``) they are the draft's weight, too, and ``low`` is empty.

    Attributes:
        high: bits of each code that the draft has in memory.
        nbytes: as in ``Decoder``; this module is the decoder of its low bits.
    """

    outcore_streamed = (LOW,)
    high: int
    nbytes = 0

    def whole(self, rows: slice | None = None) -> tuple[mx.array, mx.array, mx.array]:
        """Returns words, scales and biases as the original ``QuantizedLinear`` has them."""
        low, biases, coarse = self[LOW], self["biases"], self.coarse
        if rows is not None:
            biases, low = biases[rows], low if self.settled else low[rows]
        if coarse is None:
            shape = (*low.shape[:-1], low.shape[-1] // (self.bits - self.high) * self.bits)
            return mx.broadcast_to(low[..., :1], shape), biases * mx.nan, biases
        words, scales, _ = coarse._own(rows)
        if self.settled:
            return words, scales, biases
        # ``low`` may hold all bits already (``decode``).
        if low.shape[-1] * 32 != biases.shape[-1] * self.group_size * self.bits:
            low = joined(words, low, self.bits, self.high)
        # Dividing by the power of two that the draft's scales were multiplied with is exact.
        return low, scales * 2 ** (self.high - self.bits), biases

    def decode(self, low: mx.array) -> mx.array:
        """As in ``Decoder``: joins the low bits in a slot to whole codes, once for all calls that use the slot."""
        coarse, rows = self.coarse, self.__dict__.get("_outcore_rows")
        if coarse is None or self.settled:
            return low
        words = coarse["weight"]
        if rows is None:
            return joined(words, low, self.bits, self.high)
        whole: mx.array = rows.product(low.shape[0], lambda s: joined(words[s], low[s], self.bits, self.high), axis=0)
        return whole

    @property
    def settled(self) -> bool:
        return self.coarse is not None and self.coarse.bits == self.bits

    def settle(self) -> None:
        """Joins the codes once, because ``low`` stays in memory. The whole codes become the draft's weights, too."""
        if (coarse := self.coarse) is None or self.settled or not self[LOW].size:
            return
        words, scales, _ = self.whole()
        mx.eval(words, scales)
        coarse.weight, coarse.scales, coarse.bits = words, scales, self.bits
        self[LOW] = mx.zeros((0,), mx.uint32)

    def unsettle(self) -> None:
        """Cuts the draft's weights to the high bits again; from then on ``low`` is read from disk."""
        if (coarse := self.coarse) is None or not self.settled:
            return
        arrays = coarse._own(None)
        step = max(1, CUT_BYTES // (arrays[0].shape[-1] * 4))
        parts: list[tuple[mx.array, mx.array]] = []
        for begin in range(0, arrays[0].shape[0], step):
            words, scales, biases = (a[begin : begin + step] for a in arrays)
            parts.append(high_plane(words, scales, biases, self.bits, self.high)[:2])
            mx.eval(parts[-1])
        words, scales = (mx.concatenate(list(each)) for each in zip(*parts, strict=True))
        mx.eval(words, scales)
        coarse.weight, coarse.scales, coarse.bits = words, scales, self.high

    def _extra_repr(self) -> str:
        rows, groups = self["biases"].shape
        sizes = f"input_dims={groups * self.group_size}, output_dims={rows}, group_size={self.group_size}"
        return f"{sizes}, bits={self.bits}, of them high={self.high}"

    @property
    def coarse(self) -> CoarseLinear | None:
        """The draft's module, which has this layer's high bits; None until ``share``. It is not in the module tree."""
        found: CoarseLinear | None = self.__dict__.get("_outcore_coarse")
        return found

    def share(self, coarse: CoarseLinear) -> None:
        self.__dict__["_outcore_coarse"] = coarse

    @property
    def joined_bytes(self) -> int:
        return int(self["biases"].size * self.group_size * self.bits // 8)


def nest(module: nn.QuantizedLinear, high: int) -> None:
    """Turns a quantized layer into a ``NestedLinear`` without the ``high`` highest bits of its codes."""
    low = low_plane(module.weight, module.bits, high)
    dict.__delitem__(module, "weight")
    dict.__delitem__(module, "scales")
    module[LOW] = low
    module.__dict__.update(high=high, all_bits=module.bits)
    module.__class__ = NestedLinear


def coarsen(module: nn.QuantizedLinear, high: int) -> None:
    """Turns a quantized layer into a ``CoarseLinear`` with the ``high`` highest bits of its codes."""
    module.__dict__["all_bits"] = module.bits
    module.weight, module.scales, _ = high_plane(module.weight, module.scales, module.biases, module.bits, high)
    module.bits = high
    module.__class__ = CoarseLinear
