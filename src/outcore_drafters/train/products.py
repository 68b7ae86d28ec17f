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

from ..config import GROUPS

# Bits of the codes of a drafter's weights when it drafts.
CODE_BITS = 4


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


def _plain(a: mx.array, b: mx.array) -> mx.array:
    return _numpy(a, b) if on_cpu() else a @ b


@mx.custom_function
def _product(a: mx.array, b: mx.array) -> mx.array:
    return _numpy(a, b)


@_product.vjp
def _gradients(primals: Any, cotangent: mx.array, _: mx.array) -> tuple[mx.array, mx.array]:
    a, b = primals
    return _numpy(cotangent, b.swapaxes(-1, -2)), _numpy(a.swapaxes(-1, -2), cotangent)


def log_sums(states: mx.array, head: mx.array, offsets: mx.array) -> tuple[mx.array, mx.array]:
    """Returns the log-sum-exp (rows,) of the logits of ``states`` (rows, hidden), and its gradient (rows, hidden).

    Args:
        head: (tokens, hidden).
        offsets: added to the logits, (tokens,).
    """
    if not on_cpu():
        logits = (states.astype(head.dtype) @ head.T).astype(mx.float32) + offsets
        sums = mx.logsumexp(logits, axis=-1, keepdims=True)
        return sums[:, 0], (mx.exp(logits - sums).astype(head.dtype) @ head).astype(mx.float32)
    weights = np.array(head, copy=False)
    made = np.array(states, copy=False) @ weights.T + np.array(offsets, copy=False)
    highest = made.max(axis=-1, keepdims=True)
    # NumPy's takes a tenth of the time of MLX's. Numbers below the normal ones would slow the next product down.
    made = np.exp(np.maximum(made - highest, -40))
    added = made.sum(axis=-1, keepdims=True)
    return mx.array((np.log(added) + highest)[:, 0]), mx.array(made @ weights / added)


def coarse(weight: mx.array) -> mx.array:
    """Returns a matrix as it is when quantized to 4 bits, or unchanged if its rows cannot be."""
    if (group := next((g for g in GROUPS if weight.shape[-1] % g == 0), None)) is None:
        return weight
    made: mx.array = mx.dequantize(*mx.quantize(weight, group, CODE_BITS), group, CODE_BITS)
    return made


class Linear(nn.Linear):
    """A matrix without bias that computes with its weights as they are when quantized to 4 bits, so that a drafter is
    trained as it is used; gradients are those of the weights themselves (straight-through estimator, Bengio et al.
    2013, arXiv 1308.3432).

    MLX would make a gradient as large as the matrix for each product before it adds them. Here ``gradient`` makes one
    of all products' rows.
    """

    def coarsen(self) -> None:
        """Quantizes the weights as they are now. To be called before products, and again after ``gradient``."""
        weight = coarse(self.weight)
        mx.eval(weight)
        self._rows: Any = ([], [])  # of all products' gradients, and inputs

        @mx.custom_function
        def product(x: mx.array) -> mx.array:
            return _plain(x.reshape(-1, x.shape[-1]), weight.T).reshape(*x.shape[:-1], weight.shape[0])

        @product.vjp
        def pull(x: mx.array, cotangent: mx.array, _: mx.array) -> mx.array:
            for rows, given in zip(self._rows, (cotangent, x), strict=True):
                rows.append(given.reshape(-1, given.shape[-1]))
            return _plain(self._rows[0][-1], weight).reshape(x.shape)

        self._product: Any = product

    def __call__(self, x: mx.array) -> mx.array:
        made: mx.array = self._product(x)
        return made

    @property
    def rows(self) -> Any:
        """What ``gradient`` is made of."""
        return self._rows

    def free(self) -> None:
        """Frees the quantized weights, which are not needed once ``rows`` are evaluated."""
        self._product = None

    def gradient(self) -> mx.array:
        """Returns the weights' gradient by all products since ``coarsen``."""
        cotangents, inputs = (mx.concatenate(rows) for rows in self._rows)
        self._rows = None
        return _plain(cotangents.T, inputs)


@contextmanager
def fast_quantized(*, evaluated: bool) -> Iterator[None]:
    """``mx.quantized_matmul`` dequantizes the weights and multiplies: on a CPU by NumPy, which is much faster for many
    rows of bfloat16; on a GPU without the kernels that MLX compiles for minutes on CUDA.

    Args:
        evaluated: all weights are in memory; if not, nothing is changed, since a streamed layer must not be
            evaluated before it has been read.
    """
    if not evaluated:
        yield
        return
    own = mx.quantized_matmul

    def multiplied(x: mx.array, w: mx.array, *more: Any, **how: Any) -> mx.array:
        if more or w.ndim != 2:  # a matrix for each head, as in latent attention
            return own(x, w, *more, **how)
        transposed = how.pop("transpose", True)
        weight = mx.dequantize(w, **how)
        if on_cpu():
            weight, x32 = weight.astype(mx.float32), x.astype(mx.float32)
            return matmul(x32, weight.T if transposed else weight).astype(x.dtype)
        return (x @ (weight.T if transposed else weight)).astype(x.dtype)

    mx.quantized_matmul = multiplied
    try:
        yield
    finally:
        mx.quantized_matmul = own
