"""Signs of paging, from readings of memory pressure over time. Nothing is read here."""

from __future__ import annotations

from ..machine.pressure import Pressure

WINDOW_S = 2.0
"""Seconds that a rate is taken over at least: one fault in a millisecond is not a thousand a second."""

HOLD_S = 4.0
"""Seconds for which paging shows before it counts: libraries being loaded, or an app that wakes up, are a burst."""

PAGING = 200.0
"""Major faults, or pages of 4 KiB swapped in, a second: 2 % of the time on a disk that answers in 0.1 ms."""

STALLED = 0.10
"""Share of the time in which some task waited for memory. Alone it means nothing: cached reads in a group that page
cache fills stall 25 % of the time (measured, cgroup v1), and nothing is wrong."""


class Signs:
    """Signs of memory that is short, for one model while it runs.

    Attributes:
        gone_wrong: what has gone wrong since then, for the user; empty for nothing.
        quiet: nothing was swapped in to speak of in the last window.
    """

    def __init__(self) -> None:
        self.gone_wrong = ""
        self.quiet = True
        self._before: Pressure | None = None
        self._window: tuple[float, Pressure] | None = None  # where the rates of this window begin
        self._full = False  # all tasks waited for memory in the last window
        self._paging_s = 0.0  # for how long now

    @property
    def paging(self) -> bool:
        """Whether memory is being paged. No sign counts alone: faults come from libraries, stalls and swapping from a
        neighbour."""
        return self._paging_s >= HOLD_S

    @property
    def drowning(self) -> bool:
        """Whether memory is being paged, and everything waits for it."""
        return self.paging and self._full

    @property
    def calm(self) -> bool:
        """Whether nothing shows at all."""
        return self.quiet and not self._paging_s

    def read(self, now: float, pressure: Pressure, short: bool) -> None:
        """Take a reading in. ``short``: there is little room."""
        before, self._before = self._before or pressure, pressure
        self.gone_wrong = ""
        if pressure.oom_kill > before.oom_kill:
            self.gone_wrong = "the kernel has ended a process of this control group for want of memory"
        elif pressure.oom > before.oom:
            self.gone_wrong = "the control group ran out of memory"
        elif pressure.under_oom:
            self.gone_wrong = "tasks of the control group wait for memory that is not there"
        began, base = self._window = self._window or (now, pressure)
        if (seconds := now - began) < WINDOW_S:
            return
        self._window = (now, pressure)

        def grown(name: str, least: float = PAGING) -> bool:
            return (getattr(pressure, name) or 0) - (getattr(base, name) or 0) >= least * seconds

        faulting, swapping = grown("major_faults"), grown("swap_ins")
        stalled = grown("some_us", STALLED * 1e6)
        self._full = grown("full_us", 2 * STALLED * 1e6)
        self.quiet = not swapping
        paging = (faulting and (swapping or stalled or short)) or (swapping and short)
        self._paging_s = self._paging_s + seconds if paging else 0.0

    def start_over(self, now: float, pressure: Pressure) -> None:
        """The number of residents has changed: rates from before say nothing about what comes."""
        self._window, self._paging_s = (now, pressure), 0.0
