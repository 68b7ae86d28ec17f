"""What other processes take of the processors meanwhile: measurements are judged by it.

Others can only make computing slower, so a turn of measurements that they disturbed is taken again, and where none was
left alone the best moment counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import psutil  # type: ignore[import-untyped]

BUSY = 0.1
"""Share of all cores used by others from which on a measurement counts as disturbed. Interrupts of our own reads and a
desktop at rest stay below."""

_BUSY_TIMES = ("user", "nice", "system", "irq", "softirq", "steal")


def busy_seconds() -> float | None:
    """Seconds that all processors together have worked so far, for whomever, a host's other guests included; None
    where the system does not say."""
    try:
        times = psutil.cpu_times()
    except (OSError, RuntimeError, psutil.Error):
        return None
    return float(sum(getattr(times, name, 0.0) for name in _BUSY_TIMES))


class Neighbours:
    """Share of the processors that others use, from one call of ``lap`` to the next.

    Args:
        busy: seconds that all processors have worked, or None. own: those that were this process's.
        cores: processors that ``busy`` speaks of.
    """

    def __init__(
        self,
        busy: Callable[[], float | None] = busy_seconds,
        own: Callable[[], float] = time.process_time,
        clock: Callable[[], float] = time.perf_counter,
        cores: int | None = None,
    ) -> None:
        self._busy, self._own, self._clock = busy, own, clock
        self._cores = cores or psutil.cpu_count() or 1
        self._last = self._read()
        self._began = self._last

    def lap(self) -> float | None:
        """Share of all cores that others used since the last call, 0 to 1; None where the system does not say."""
        before, self._last = self._last, self._read()
        return self._share(before)

    def whole(self) -> float | None:
        """The same since the beginning."""
        return self._share(self._began, self._read())

    def _read(self) -> tuple[float, float | None, float]:
        return self._clock(), self._busy(), self._own()

    def _share(
        self, before: tuple[float, float | None, float], now: tuple[float, float | None, float] | None = None
    ) -> float | None:
        (t0, busy0, own0), (t1, busy1, own1) = before, now or self._last
        if busy0 is None or busy1 is None or t1 <= t0:
            return None
        return min(1.0, max(0.0, (busy1 - busy0 - (own1 - own0)) / (t1 - t0) / self._cores))


def undisturbed(loads: Sequence[float | None]) -> list[int]:
    """The turns in which others used less than ``BUSY``, by their number; a load that is not known disturbs nothing."""
    return [i for i, load in enumerate(loads) if load is None or load < BUSY]
