"""Speed of the device without a model: synchronization, products, and decoding of weights."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import mlx.core as mx
import numpy as np

from outcore_packs.split_exponents import EXPONENTS, SplitDecoder

# Bytes of weights between two uses of the same one, so that weights come from memory as in a real run: more than one
# core's last-level cache (32 MiB here).
PAST_CACHES = 128 << 20

# Matrices used in turn, together past the caches; uses of each; and repeats of a single product.
PARTS, ROUNDS, REPEATS = 8, 3, 5


def seconds_of(run: Callable[[], Any], clock: Callable[[], float] = time.perf_counter, repeats: int = REPEATS) -> float:
    """Returns the median seconds until the result of ``run`` is computed."""
    times = []
    for _ in range(repeats):
        begin = clock()
        mx.eval(run())
        times.append(clock() - begin)
    return median(times)


def sync_seconds() -> float:
    """Returns the median seconds of submitting a tiny graph and waiting for it."""
    x = mx.zeros((8,))
    mx.eval(x)
    return seconds_of(lambda: (x + 1) * 2, repeats=200)


def _gbps(shape: tuple[int, ...], dtype: mx.Dtype, use: Callable[[mx.array], mx.array], made: int) -> float:
    """Returns GB/s at which ``made`` bytes are computed from each of several matrices, used in turn."""
    matrices = [mx.full(shape, 1, dtype=dtype) for _ in range(PARTS)]
    mx.eval(matrices, use(matrices[0]))  # the first use compiles it
    times = [seconds_of(lambda m=m: use(m), repeats=1) for _ in range(ROUNDS) for m in matrices]  # type: ignore[misc]
    return made / median(times) / 1e9


def product_gbps() -> float:
    """Returns GB/s of float32 weights in a product of one token, for machines without a measured model."""
    x = mx.ones((1, 4096), dtype=mx.float32)
    nbytes = PAST_CACHES // PARTS
    return _gbps((nbytes // 4096 // 4, 4096), mx.float32, lambda w: x @ w.T, nbytes)


def decode_gbps() -> float:
    """Returns GB/s of bfloat16 weights decoded from signs, mantissas and coded exponents."""
    nbytes = PAST_CACHES // PARTS
    shape = nbytes // 2 // 4096, 4096
    decoder = SplitDecoder.of(shape, np.zeros(EXPONENTS // 4 + shape[0] + 1, np.uint32))
    return _gbps(decoder.stored_shape, mx.uint8, decoder.decode, nbytes)
