"""What sweeps for single tokens take while a model runs: seconds but for those in which other ranks are waited for, of
waiting for the disk, and of reading."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from ..machine.neighbours import Neighbours
from ..plan.correction import LEAST_SWEEPS, Swept
from ..plan.plan import Plan
from .state import State

MOST = 512
"""Sweeps that are held: the last ones."""

LAP_S = 0.5
"""Seconds between looks at what others use of the processors: they are counted in hundredths."""


@dataclass(frozen=True)
class _Mark:
    """Counters where a sweep begins."""

    sweeps: int
    stall_s: float
    reading_s: float
    at: float
    plan: Plan


class SweepLog:
    """Notes each sweep for one token by the plan that there was at first.

    Args:
        state: of a streamed model; held weakly.
        neighbours: watches what others use of the processors.
    """

    def __init__(self, state: State, neighbours: Callable[[], Neighbours] = Neighbours) -> None:
        self.plan = state.plan
        self.sweeps = 0
        self._state = weakref.ref(state)
        self._neighbours = neighbours()
        self._swept: deque[Swept] = deque(maxlen=MOST)
        self._mark: _Mark | None = None
        self._others_s = self._watched_s = 0.0
        self._since: float | None = None

    def begin(self) -> None:
        """A sweep is about to begin, so the one before is known."""
        state = self._state()
        if state is None or state.streaming is None:
            return
        metrics, streaming, before = state.metrics, state.streaming, self._mark
        _, reading_s = metrics.reading()
        self._mark = _Mark(metrics.sweeps, metrics.stall_s, reading_s, metrics.clock(), state.plan)
        seconds = streaming.sweep_s
        whole = before is not None and metrics.sweeps == before.sweeps + 1 and before.plan is state.plan is self.plan
        if not whole or before is None or streaming.sweep_tokens != 1 or seconds is None or seconds <= 0:
            self._since = None
            return
        stall_s, reading_s = metrics.stall_s - before.stall_s, reading_s - before.reading_s
        # A rank of several reads while it waits for others, too.
        most_s = seconds if state.transport.alone else metrics.clock() - before.at
        if 0 <= stall_s <= seconds and reading_s >= 0:  # else counted from zero again meanwhile
            self._swept.append(Swept(seconds, stall_s, min(most_s, reading_s)))
            self.sweeps += 1
            self._look(metrics.clock())

    def _look(self, now: float) -> None:
        if self._since is None:
            self._neighbours.lap()
            self._since = now
        elif now - self._since >= LAP_S:
            load = self._neighbours.lap()
            if load is not None:
                self._others_s += load * (now - self._since)
                self._watched_s += now - self._since
            self._since = now

    def found(self) -> tuple[Swept, float | None] | None:
        """The middle of all sweeps, each number by itself, and the share of the cores that others used meanwhile; None
        where there are too few."""
        if self.sweeps < LEAST_SWEEPS:
            return None
        middle = Swept(
            median(s.seconds for s in self._swept),
            median(s.stall_s for s in self._swept),
            median(s.reading_s for s in self._swept),
        )
        return middle, self._others_s / self._watched_s if self._watched_s else None
