"""Uses all cores on the CPU device: linear layers compute slices of their output rows on one MLX stream per core.

On MLX's CPU device a stream is a thread. Output rows are independent, so the concatenated slices equal the whole
product bit for bit. Modules get another class, as for streaming, so this works for streamed and resident weights alike.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .layers import modules

SMALLEST = 1 << 18  # Number of weights below which one stream is faster than handing work to another.

# Slices begin at multiples of so many rows. Then MLX computes each row by the same inner loop as in the whole product.
ROW_STEP = 64


@functools.cache
def _stream(number: int) -> Any:
    """A stream that all models share: MLX never ends its thread, and waits for every stream to clear its cache."""
    return mx.new_thread_local_stream(mx.cpu)


@functools.cache
def _parts(rows: int, streams: int) -> list[tuple[slice, Any]]:
    """Slices of output rows, each with its stream; the last has None, the current stream."""
    bounds = [min(rows, -(-rows * i // streams // ROW_STEP) * ROW_STEP) for i in range(streams)] + [rows]
    slices = [slice(a, b) for a, b in pairwise(bounds) if b > a]
    return list(zip(slices, [*map(_stream, range(len(slices) - 1)), None], strict=True))


class Rows:
    """Splits a model's products over streams."""

    def __init__(self, streams: int) -> None:
        self.streams = streams

    def product(self, rows: int, part: Callable[[slice], mx.array], axis: int = -1) -> mx.array:
        """Compute ``part`` for each slice of rows on its own stream, and concatenate the results along ``axis``."""
        found = []
        for rows_, stream in _parts(rows, self.streams):
            with mx.stream(stream) if stream is not None else contextlib.nullcontext():
                found.append(part(rows_))
        return mx.concatenate(found, axis=axis)


def _product(module: nn.Module, x: mx.array) -> mx.array:
    weight, bias, scales, biases = module["weight"], module.get("bias"), module.get("scales"), module.get("biases")
    if scales is not None:
        how = {"transpose": True, "group_size": module.group_size, "bits": module.bits, "mode": module.mode}
    found = []
    for s, stream in _parts(weight.shape[0], module.__dict__["_outcore_rows"].streams):
        with mx.stream(stream) if stream is not None else contextlib.nullcontext():
            if scales is not None:
                zeros = None if biases is None else biases[s]
                found.append(mx.quantized_matmul(x, weight[s], scales=scales[s], biases=zeros, **how))
            elif bias is None:
                found.append(x @ weight[s].T)
            else:
                found.append(mx.addmm(bias[s], x, weight[s].T))
    out = mx.concatenate(found, axis=-1)
    return out if bias is None or scales is None else out + bias


def _swapped(kind: type[nn.Module], method: str) -> type[nn.Module]:
    return type(f"Rows{kind.__name__}", (kind,), {method: _product, "__module__": __name__})


SPLIT: dict[type[nn.Module], type[nn.Module]] = {
    **{kind: _swapped(kind, "__call__") for kind in (nn.Linear, nn.QuantizedLinear)},
    **{kind: _swapped(kind, "as_linear") for kind in (nn.Embedding, nn.QuantizedEmbedding)},
}


def split_rows(model: nn.Module, streams: int, smallest: int = SMALLEST) -> int:
    """Split each linear module of at least ``smallest`` weights over ``streams`` streams; return how many were split.

    The modules must have weights of the right shapes; their values are not read. Only MLX's own classes are replaced. A
    module of another class that can split its product has an attribute ``outcore_split``, its numbers of output rows
    and weights; ``Rows`` is put into its ``_outcore_rows``.
    """
    if streams < 2:
        return 0
    rows, count = Rows(streams), 0
    for module in modules(model):
        kind = type(module)
        if kind in SPLIT:
            weight = module["weight"]
            outputs, weights = weight.shape[0], weight.size * 32 // getattr(module, "bits", 32)
        elif hasattr(kind, "outcore_split"):
            outputs, weights = module.outcore_split
        else:
            continue
        if outputs >= 2 * ROW_STEP and weights >= smallest:
            module.__class__ = SPLIT.get(kind, kind)
            module.__dict__["_outcore_rows"] = rows
            count += 1
    return count
