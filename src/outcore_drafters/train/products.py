"""Matrix products for training. MLX's own on the CPU make 2 GFLOP/s on a core (the reference BLAS is in its wheels,
MLX 0.32.4); NumPy's make 40."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from outcore.machine.device import on_cpu


def matmul(a: mx.array, b: mx.array) -> mx.array:
    """Returns ``a @ b``, differentiable. ``b``: two dimensions, or as many as ``a`` and no broadcasting.

    On a CPU both are float32 and evaluated at once.
    """
    if not on_cpu():
        return a @ b
    product: Any = _product
    flat = a.reshape(-1, a.shape[-1]) if b.ndim == 2 else a
    made: mx.array = product(flat, b).reshape(*a.shape[:-1], b.shape[-1])
    return made


def _numpy(a: mx.array, b: mx.array) -> mx.array:
    return mx.array(np.matmul(np.array(a, copy=False), np.array(b, copy=False)))


@mx.custom_function
def _product(a: mx.array, b: mx.array) -> mx.array:
    return _numpy(a, b)


@_product.vjp
def _gradients(primals: Any, cotangent: mx.array, _: mx.array) -> tuple[mx.array, mx.array]:
    a, b = primals
    return _numpy(cotangent, b.swapaxes(-1, -2)), _numpy(a.swapaxes(-1, -2), cotangent)


class Linear(nn.Linear):
    """Without bias."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return matmul(x, self.weight.T)


@contextmanager
def fast_quantized(*, evaluated: bool) -> Iterator[None]:
    """Quantized layers dequantize their weights and multiply by NumPy: 5 times as fast on a CPU for 64 texts in a pass
    of a model in bfloat16.

    Args:
        evaluated: all weights are in memory; if not, nothing is changed, since a streamed layer must not be
            evaluated before it has been read.
    """
    if not (evaluated and on_cpu()):
        yield
        return

    def multiplied(self: nn.Module, x: mx.array) -> mx.array:
        biases = self.get("biases")
        weight = mx.dequantize(self.weight, self.scales, biases, self.group_size, self.bits, mode=self.mode)
        made = matmul(x.astype(mx.float32), weight.astype(mx.float32).T)
        return (made + self.bias if "bias" in self else made).astype(x.dtype)

    methods = [(nn.QuantizedLinear, "__call__"), (nn.QuantizedEmbedding, "as_linear")]
    saved = [getattr(kind, name) for kind, name in methods]
    try:
        for kind, name in methods:
            setattr(kind, name, multiplied)
        yield
    finally:
        for (kind, name), own in zip(methods, saved, strict=True):
            setattr(kind, name, own)
