"""How long a model's layers take, by kind and number of tokens, in memory; and what a device computes without one."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from statistics import median

import mlx.core as mx
import numpy as np

from ..machine.device import on_cpu
from ..modules.code_planes import joined
from ..modules.split_exponents import EXPONENTS, SplitDecoder
from ..plan.machine_profile import TOKENS
from .random_model import PAST_CACHES, Rig, seconds_of

SAMPLES = 6
"""Times that each kind of layer is timed for each number of tokens, where there is time."""

PREFILL, STEPS = 8, 6
"""Tokens before those whose whole forward passes are timed, and how many those are."""

COMPUTE_S, COMPILE_S = 12.0, 20.0
"""Seconds of measuring a model after which no larger number of tokens is begun, and of compiling its GPU kernels."""

PARTS = 8
"""Matrices that are computed with where there is no model: a part takes milliseconds, and all are past the caches."""

Progress = Callable[[str, int, int], None]


def sync_seconds(clock: Callable[[], float] = time.perf_counter, repeats: int = 200) -> float:
    """Seconds of handing a graph of hardly any work to the device and waiting for it: median."""
    x = mx.zeros((8,))
    mx.eval(x)
    return seconds_of(lambda: (x + 1) * 2, clock, repeats)


def times_of(
    made: Rig, sync_s: float, *, budget_s: float = COMPUTE_S, progress: Progress = lambda *_: None
) -> dict[str, dict[int, float]]:
    """Seconds of one pass, by kind of layer (and of what is not a layer) and by number of tokens.

    Layers are evaluated and timed one by one. For one token their shares are scaled to what a token takes in whole
    passes, in which nothing is waited for on the way; what waiting for each layer added is taken off for more tokens.

    Args:
        sync_s: what waiting for one layer costs, where there is no time for a whole pass.
        budget_s: seconds that it may take; what no time is left for is left out.
    """
    size = made.profile.size
    kinds = {layer.kind for layer in size.layers}
    if not on_cpu():
        _compile_s(made, 1, kinds)
    deadline = made.clock() + budget_s
    first = made.watched(1)  # a whole pass: products with tables are known behind it
    calls = Counter({kind: len(times) for kind, times in first.layers.items()})
    found: dict[str, dict[int, float]] = {kind: {} for kind in (*sorted(kinds), size.rest_kind)}
    whole_s = None
    if made.clock() + (PREFILL + STEPS) * first.seconds < deadline:
        whole_s = median(made.decode(PREFILL, STEPS))
    took = first.seconds
    waiting = scale = 0.0
    for i, n in enumerate(TOKENS):
        progress("measuring the layers", i, len(TOKENS))
        if n > 1 and made.clock() + took * n / TOKENS[i - 1] > deadline:
            break
        if n > 1 and not on_cpu():
            seconds = _compile_s(made, n, kinds)
            deadline += seconds
            if seconds > COMPILE_S:
                break
        made.watched(n, bool)  # up to the first layer: what is made once for each number of tokens is nobody's time
        began = made.clock()
        enough = partial(_enough, kinds, made.clock, min(deadline, began + budget_s / len(TOKENS)))
        seen = first if n == 1 and took * SAMPLES > budget_s else made.watched(n, enough)
        head, computed = made.head(n)
        # Of one layer of each kind, and the head.
        took = seen.seconds / min(map(len, seen.layers.values()), default=1) + head
        times = {kind: median(samples) for kind, samples in seen.layers.items()}
        if n == 1:
            in_layers = sum(calls[kind] * s for kind, s in times.items())
            mean = in_layers / max(1, calls.total())
            alone = max(0.5, 1 - sync_s / mean)
            scale = min(1.0, whole_s / (in_layers + seen.prelude + computed)) if whole_s is not None else alone
            waiting = mean * (1 - scale)
        for kind, s in times.items():
            found[kind][n] = s * scale if n == 1 else max(s - waiting, s * scale)
        found[size.rest_kind][n] = (seen.prelude + head) * (scale if n == 1 else 1.0)
    progress("measuring the layers", len(TOKENS), len(TOKENS))
    return {kind: by_tokens for kind, by_tokens in found.items() if by_tokens}


def _enough(kinds: set[str], clock: Callable[[], float], until: float, layers: dict[str, list[float]]) -> bool:
    counts = [len(layers[kind]) for kind in kinds]
    return min(counts) >= SAMPLES or (min(counts) >= 1 and clock() > until)


def _compile_s(made: Rig, n: int, kinds: set[str]) -> float:
    """Run each kind of layer once, and the head: MLX compiles GPU kernels when they are first needed, which on an H200
    took 24 to 62 s for a number of tokens. Returns the seconds that it took."""
    began = made.clock()
    made.watched(n, lambda layers: kinds <= layers.keys())
    made.head(n)
    return made.clock() - began


def product_gbps() -> float:
    """GB/s of weights in a product of one token, float32: what a machine does where no model says more."""
    columns = 4096
    weights = [mx.full((PAST_CACHES // PARTS // columns // 4, columns), 0.01, dtype=mx.float32) for _ in range(PARTS)]
    x = mx.ones((1, columns), dtype=mx.float32)
    mx.eval(weights, x)
    seconds = [seconds_of(partial(mx.matmul, x, w.T), time.perf_counter, 1) for _ in range(3) for w in weights]
    return weights[0].nbytes / median(seconds) / 1e9


def join_gbps(streams: int) -> float:
    """GB/s of 4-bit codes that are put together from 2 high and 2 low bits, by all streams together."""
    shape = 1024, PAST_CACHES // PARTS // 1024 // 8
    high, low = mx.full(shape, 1, dtype=mx.uint32), mx.full(shape, 2, dtype=mx.uint32)
    mx.eval(high, low, joined(high, low, 4, 2))  # the first one compiles it
    return streams * 2 * high.nbytes / seconds_of(partial(joined, high, low, 4, 2), time.perf_counter, PARTS) / 1e9


def cast_gbps() -> float:
    """GB/s of float32 weights that are made of bfloat16 ones, as large as layers have them."""
    stored = [mx.full((1024, PAST_CACHES // PARTS // 4096), 1, dtype=mx.bfloat16) for _ in range(PARTS)]
    mx.eval(stored)
    seconds = [seconds_of(partial(w.astype, mx.float32), time.perf_counter, 1) for _ in range(3) for w in stored]
    return 2 * stored[0].nbytes / median(seconds) / 1e9


def decode_gbps() -> float:
    """GB/s of bfloat16 weights that are put together from their signs, mantissas and codes of exponents."""
    shape = PAST_CACHES // PARTS // 2 // 4096, 4096
    decoder = SplitDecoder.of(shape, np.zeros(EXPONENTS // 4 + shape[0] + 1, np.uint32))
    rows = mx.full(decoder.stored_shape, 0x31, dtype=mx.uint8)
    mx.eval(rows, decoder.decode(rows))  # the first one compiles it
    return shape[0] * shape[1] * 2 / seconds_of(partial(decoder.decode, rows), time.perf_counter) / 1e9
