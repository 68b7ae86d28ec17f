"""What readings of memory show over time: rates, events, and how much others take.

The governor decides by it. Nothing is read here, and no unit is touched.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from ..machine.pressure import Pressure, Stall
from .governor_policy import Policy


@dataclass(frozen=True)
class Rates:
    """What two readings differ by. A second, or a share of time."""

    faults: float = 0.0
    swap_ins: float = 0.0
    swap_outs: float = 0.0
    decompressions: float = 0.0
    some: float = 0.0
    full: float = 0.0


class Signs:
    """Signs of memory that is short, for one model while it runs.

    Attributes:
        rates: over the last window.
        paging_s: for how long there have been signs of paging.
        squeezed_s: for how long macOS has been swapping out or decompressing.
        swept: a sweep was seen since ``start_over``.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.rates = Rates()
        self.paging_s = 0.0
        self.squeezed_s = 0.0
        self.swept = True
        self._base: tuple[float, Pressure] | None = None  # rates run from here
        self._events: Pressure | None = None  # the reading before, for events
        self._slow = 0  # sweeps in a row
        self._sweep_s = 0.0
        self._room: deque[tuple[float, int]] = deque()
        self._taken: deque[tuple[float, dict[str, int], int]] = deque()  # used of each limit, and by ourselves
        self._highs: deque[float] = deque()  # when others took more than ever
        self._highest: tuple[str, int, int] | None = None

    def read(self, now: float, pressure: Pressure) -> tuple[str, bool]:
        """Take a reading's counters in; returns what has gone wrong since the last, and whether less is asked for."""
        before, self._events = self._events or pressure, pressure
        if self._base is None:
            self._base = (now, pressure)
        began, base = self._base
        seconds = now - began
        if seconds >= (self.policy.window_s if pressure.macos_level is None else self.policy.macos_window_s):
            self._base = (now, pressure)
            self.rates = rates = Rates(
                faults=max(0, pressure.major_faults - base.major_faults) / seconds,
                swap_ins=_rate(base.swap_ins, pressure.swap_ins, seconds),
                swap_outs=_rate(base.swap_outs, pressure.swap_outs, seconds),
                decompressions=_rate(base.decompressions, pressure.decompressions, seconds),
                some=_stalled(base.some, pressure.some, seconds),
                full=_stalled(base.full, pressure.full, seconds),
            )
            self.paging_s = self.paging_s + seconds if self._paging(pressure) else 0.0
            squeezed = rates.swap_outs >= self.policy.swap_outs or rates.decompressions >= self.policy.decompressions
            on_mac = pressure.macos_level is not None
            self.squeezed_s = self.squeezed_s + seconds if on_mac and squeezed else 0.0
        was, events = before.events, pressure.events
        asked = (pressure.alarms or 0) > (before.alarms or 0)
        if events.oom_kill > was.oom_kill:
            return "the kernel has ended a process of this control group for want of memory", asked
        if events.oom > was.oom:
            return "the control group ran out of memory", asked
        return "tasks of the control group wait for memory that is not there" if events.under_oom else "", asked

    def note_sweep(self, sweep_s: float | None, predicted_s: float | None) -> None:
        """A sweep that took so long, and what it should have taken; None: there was none, or it is not known."""
        if sweep_s is None:
            return
        self.swept, self._sweep_s = True, sweep_s
        if predicted_s is not None:
            self._slow = self._slow + 1 if sweep_s > self.policy.slow * predicted_s else 0

    def note_room(self, now: float, available: int) -> None:
        """So much is free of the limit that is nearest: ``shrinking`` compares with it."""
        while len(self._room) > 1 and now - self._room[0][0] > self.policy.memory_s:
            self._room.popleft()
        self._room.append((now, available))

    def answered(self, pressure: Pressure) -> None:
        """What the system has asked for until now has been given."""
        if self._events is not None:
            self._events = replace(self._events, alarms=pressure.alarms)

    def start_over(self, now: float, pressure: Pressure) -> None:
        """The number of residents changes: what was read before says nothing about what comes."""
        self._base, self.rates = (now, pressure), Rates()
        self.paging_s, self.squeezed_s, self._slow = 0.0, 0.0, 0
        self.swept = False

    def _short(self, pressure: Pressure) -> bool:
        return any(x.available < self.policy.short * self.policy.reserve(x) for x in pressure.limits)

    def _paging(self, pressure: Pressure) -> bool:
        policy, rates = self.policy, self.rates
        faulting, short = rates.faults >= policy.faults, self._short(pressure)
        swapping, stalled = rates.swap_ins >= policy.swap_ins, rates.some >= policy.some_stalled
        # Stalls and short room are not enough: cached reads in a group that page cache fills stall 25 % of the time
        # (measured, cgroup v1), and nothing is wrong.
        return (faulting and (swapping or stalled or short)) or (swapping and short)

    def thrashing(self, pressure: Pressure) -> bool:
        """Sweeps are slow, and paging explains it: on a hard disk a hundred faults are a second."""
        rates, trace = self.rates, self.policy.trace
        elsewhere = rates.swap_ins >= trace or rates.some >= self.policy.some_stalled / 10
        slow = self._slow >= self.policy.slow_sweeps
        return slow and rates.faults >= trace and (elsewhere or self._short(pressure))

    def calm(self) -> bool:
        """None of them."""
        policy, rates = self.policy, self.rates
        quiet = rates.swap_ins < policy.swap_ins and (self._slow == 0 or rates.faults < policy.trace)
        return quiet and not self.paging_s and not self.squeezed_s

    def shrinking(self, available: int, reserve: int) -> bool:
        """Whether there was noticeably more room of late."""
        return any(before - available > self.policy.shrinking * reserve for _, before in self._room)

    def taken_lately(self, now: float, pressure: Pressure, own: int, source: str) -> int:
        """Bytes that others took of the limit within the time that the next shed may take to have its effect.

        A limit that this model's memory does not count against (a GPU's is not the machine's) does not shrink when
        units go, so others take what both differences show.
        """
        within = self.policy.ahead_sweeps * self._sweep_s + self.policy.seconds
        while self._taken and now - self._taken[0][0] > within:
            self._taken.popleft()
        used = {x.source: x.total - x.available for x in pressure.limits}
        more = 0
        for _, before, ours in self._taken:
            if source in before:
                grown = used[source] - before[source]
                more = max(more, min(grown, grown - (own - ours)))
        self._taken.append((now, used, own))
        step = self.policy.reserve_least // 64
        high = (source, used[source], used[source] - own)
        if self._highest is None or self._highest[0] != source:
            self._highest = high
        elif high[1] > self._highest[1] + step and high[2] > self._highest[2] + step:
            self._highest = high
            self._highs.append(now)
        while self._highs and now - self._highs[0] > self.policy.memory_s:
            self._highs.popleft()
        return more

    @property
    def taking_on(self) -> bool:
        """Whether others have taken more than ever, more than once of late."""
        return len(self._highs) > 1


def _rate(before: int | None, now: int | None, seconds: float) -> float:
    """How many a second, of a counter that may have started again."""
    return max(0, (now or 0) - (before or 0)) / seconds


def _stalled(before: Stall | None, now: Stall | None, seconds: float) -> float:
    """Share of the time between two readings."""
    if before is None or now is None:
        return 0.0
    return min(1.0, max(0, now.total_us - before.total_us) / seconds / 1e6)
