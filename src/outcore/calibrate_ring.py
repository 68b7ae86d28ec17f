"""What a turn of the ring costs beyond reading and computing: threads that wake each other, a disk that idles."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import mlx.core as mx

from .calibrate_disk import MIB, Bench, Setting
from .calibration import Calibration
from .layout import Unit
from .ring import Lease, Ring
from .simulate import Stage, simulate

UNIT = 16 * MIB
"""Bytes of a unit: as large as a projection of a model of a few billion parameters."""

UNITS, ROUNDS = 24, 3
"""Units of one run through the ring, of which the first are not counted, and runs, of which the median counts."""

MOST = 0.02
"""Seconds that a turn may cost at most."""

SLOTS = 2
"""Slots of the ring: with two of them each turn waits for the one before, so that what it costs cannot hide."""


def turn_seconds(
    bench: Bench, setting: Setting, calibration: Calibration, clock: Callable[[], float] = time.perf_counter
) -> float:
    """``turn_s`` with which ``simulate`` says what a ring takes whose reads and computing take equally long.

    Ranges not read before go through a ring and a reader as they are in use; a product as long as a read stands for
    the computing. 0 where too little is left to read.

    Args:
        calibration: the rate, and by how much reading and computing slow each other down.
    """
    nbytes = min(UNIT, bench.piece)
    read_s = nbytes / calibration.read_gbps / 1e9
    product, compute_s = _product(read_s, clock)

    def said(turn_s: float) -> float:
        return simulate(
            [Stage(compute_s + calibration.sync_s, read_s)] * UNITS,
            SLOTS,
            read_slowdown=calibration.read_slowdown,
            compute_slowdown=calibration.compute_slowdown,
            turn_s=turn_s,
        ).sweep_s

    found: list[float] = []
    for _ in range(ROUNDS):
        pieces = bench.unread.take((UNITS + SLOTS) * nbytes, nbytes)[: UNITS + SLOTS]
        if len(pieces) < UNITS + SLOTS:
            break
        units = [Unit(f"calibration {i}", (), piece, nbytes) for i, piece in enumerate(pieces)]
        ring = Ring(units, setting.open(bench.unread.files), slots=SLOTS, order=range(len(units)), device=bench.device)
        try:
            found.append(_run(ring, len(units), product, clock) / len(units) * UNITS)
        finally:
            ring.close()
    least, most = 0.0, MOST
    while found and most - least > MOST / 1000:
        middle = (least + most) / 2
        least, most = (middle, most) if said(middle) < median(found) else (least, middle)
    return least


def _run(ring: Ring, units: int, product: Callable[[], mx.array], clock: Callable[[], float]) -> float:
    """Seconds of a sweep: the engine's own order of waiting, handing over and giving back."""
    ring.start()
    ring.begin_sweep()
    pending: tuple[Lease, mx.array] | None = None
    began = clock()
    for i in range(units):
        lease = ring.take(i)
        y = product()
        if not lease.read.ready and pending is not None:
            mx.eval(pending[1])
            ring.release(pending[0])
            pending = None
        ring.wait(lease)
        mx.async_eval(y)
        if pending is not None:
            mx.eval(pending[1])
            ring.release(pending[0])
        pending = lease, y
    assert pending is not None
    mx.eval(pending[1])
    ring.release(pending[0])
    return clock() - began


def _product(seconds: float, clock: Callable[[], float]) -> tuple[Callable[[], mx.array], float]:
    """Products of one token that take about so long, and how long they take by themselves: median."""
    columns, rows = 4096, 4096
    weight = mx.full((rows, columns), 0.01, dtype=mx.float32)
    x = mx.ones((1, columns), dtype=mx.float32)
    mx.eval(weight, x)

    def times(n: int) -> Callable[[], mx.array]:
        def product() -> mx.array:
            y = x
            for _ in range(n):
                y = mx.matmul(y, weight.T) * 1e-2
            return y

        return product

    def took(product: Callable[[], mx.array]) -> float:
        samples = []
        for _ in range(5):
            began = clock()
            mx.eval(product())
            samples.append(clock() - began)
        return median(samples)

    product = times(max(1, round(seconds / took(times(1)))))
    return product, took(product)
