"""What a device does without a model: waits for it, products, and weights that are decoded on their way."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import mlx.core as mx
import numpy as np

from outcore_packs.split_exponents import EXPONENTS, SplitDecoder

PAST_CACHES = 128 << 20
"""Bytes. So much weight lies between two uses of the same one, if the model has as much: more than a processor's last
level of cache holds for one core (32 MiB here), so that weights come from memory as they do in a run."""

PARTS, ROUNDS, REPEATS = 8, 3, 5
"""Matrices that are computed with, past the caches together; times that each is; and that a single product is timed."""


def seconds_of(run: Callable[[], Any], clock: Callable[[], float] = time.perf_counter, repeats: int = REPEATS) -> float:
    """Median seconds until what ``run`` returns has been computed."""
    times = []
    for _ in range(repeats):
        begin = clock()
        mx.eval(run())
        times.append(clock() - begin)
    return median(times)


def sync_seconds() -> float:
    """Median seconds of handing a graph of hardly any work to the device and waiting for it."""
    x = mx.zeros((8,))
    mx.eval(x)
    return seconds_of(lambda: (x + 1) * 2, repeats=200)


def _gbps(shape: tuple[int, ...], dtype: mx.Dtype, use: Callable[[mx.array], mx.array], made: int) -> float:
    """GB/s of ``made`` bytes that are computed from each of some matrices, which are used in turn."""
    matrices = [mx.full(shape, 1, dtype=dtype) for _ in range(PARTS)]
    mx.eval(matrices, use(matrices[0]))  # the first use compiles it
    times = [seconds_of(lambda m=m: use(m), repeats=1) for _ in range(ROUNDS) for m in matrices]  # type: ignore[misc]
    return made / median(times) / 1e9


def product_gbps() -> float:
    """GB/s of weights in a product of one token, float32: what a machine does where no model says more."""
    x = mx.ones((1, 4096), dtype=mx.float32)
    nbytes = PAST_CACHES // PARTS
    return _gbps((nbytes // 4096 // 4, 4096), mx.float32, lambda w: x @ w.T, nbytes)


def decode_gbps() -> float:
    """GB/s of bfloat16 weights that are put together from their signs, mantissas and codes of exponents."""
    nbytes = PAST_CACHES // PARTS
    shape = nbytes // 2 // 4096, 4096
    decoder = SplitDecoder.of(shape, np.zeros(EXPONENTS // 4 + shape[0] + 1, np.uint32))
    return _gbps(decoder.stored_shape, mx.uint8, decoder.decode, nbytes)
