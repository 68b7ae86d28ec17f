"""A fraction of a second of computing and reading, to tell whether the machine is still as it was when measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import mlx.core as mx

from ..errors import ReadError
from ..machine.allocator import clear_cache
from ..machine.device import on_cpu
from ..machine.neighbours import Neighbours
from ..modules.split_linear import Rows
from ..plan.certainty import Now
from ..plan.machine_profile import Calibration
from .disk import disk_rate_now

ROWS, COLUMNS, MATRICES = 2048, 4096, 2
"""Of float32 matrices that one token is multiplied with in turn: 64 MiB together, past most processors' caches."""

PRODUCT_BYTES = 4 * ROWS * COLUMNS * (MATRICES + 1)
"""Bytes that they take, and one that is being made."""

PRODUCT_S, READ_S = 0.15, 0.15
"""Seconds of computing and of reading."""

ENOUGH_BYTES = 64_000_000
"""Bytes of files from which reading them says something of the disk."""


def product_times(
    cpu_streams: int, seconds: float = PRODUCT_S, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Seconds of a fixed product, split over streams as linear layers are, again and again."""
    weights = [mx.full((ROWS, COLUMNS), 0.01 * (n + 1), dtype=mx.float32) for n in range(MATRICES)]
    x = mx.ones((1, COLUMNS), dtype=mx.float32)
    rows = Rows(cpu_streams if on_cpu() else 1)
    mx.eval(weights, x)

    def run(weight: mx.array) -> float:
        began = clock()
        mx.eval(rows.product(ROWS, lambda part: x @ weight[part].T))
        return clock() - began

    for weight in weights:
        run(weight)  # threads begin, kernels are compiled
    end = clock() + seconds
    times: list[float] = []
    while len(times) < 2 * MATRICES or clock() < end:
        times.append(run(weights[len(times) % MATRICES]))
    del weights
    clear_cache()
    return times


def look(
    calibration: Calibration,
    files: Sequence[Path],
    cpu_streams: int,
    *,
    neighbours: Neighbours | None = None,
    products: Callable[[int], Sequence[float]] = product_times,
    rate: Callable[..., float] = disk_rate_now,
) -> Now:
    """The machine as it is now beside what it was when it was measured; a third of a second.

    Args:
        files: of a model on the disk that was measured. Too small ones are not read.
    """
    neighbours = neighbours or Neighbours()
    compute = read = None
    if calibration.product_s is not None:
        compute = median(products(cpu_streams)) / calibration.product_s
    load = neighbours.lap()
    if calibration.disk_conditions is not None and sum(f.stat().st_size for f in files) >= ENOUGH_BYTES:
        try:
            gbps = rate(files, calibration, seconds=READ_S)
        except ReadError:  # whoever loads the model will hear of it
            gbps = 0.0
        read = calibration.read_gbps / gbps if gbps > 0 else None
    return Now(compute, read, load)
