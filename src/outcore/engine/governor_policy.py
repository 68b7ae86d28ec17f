"""The governor's numbers, and what it decides."""

from __future__ import annotations

from dataclasses import dataclass

from ..machine.memory import MemoryLimit

NORMAL, WARNING, CRITICAL = "normal", "warning", "critical"


@dataclass(frozen=True)
class Policy:
    """The governor's numbers. Bytes, seconds, events a second, shares of one.

    Attributes:
        reserve_share, reserve_least, reserve_most: what should stay free of a limit: a share of it, within bounds.
        short: this many reserves free or fewer make other signs believable; more must stay free after a regrow.
        floor: of the reserve; below it room is too small even if it does not shrink.
        critical: of the reserve; below it everything goes.
        stop: of the reserve; below it with nothing left to give up, and no better when looked at again, it is over.
        shrinking: of the reserve; what counts as shrinking within ``memory_s``.
        memory_s: how far back room is compared.
        window_s: rates are taken over at least this long: one fault in a millisecond is not a thousand a second.
        faults: major faults of this process a second. A disk that answers in 0.1 ms makes 200 of them 2 % of the time.
        swap_ins: pages swapped in a second, 4 KiB each.
        some_stalled, full_stalled: share of time in which some tasks, or all, waited for memory.
        trace: faults or swapped pages a second that explain a slow sweep.
        slow: times the predicted seconds that make a sweep slow; slow_sweeps: as many of them in a row.
        hold_s: how long signs of paging must hold.
        shed_share: of all units: what is shed at once.
        ahead_sweeps: what others took in so many sweeps, they may take again until the next shed has its effect.
        alert: this many reserves free or fewer are looked at each ``alert_s`` seconds.
        asked_s: how long the system may go on asking for memory when nothing is left to give, before it is over.
        grace_s: seconds, and a sweep, for a shed to have its effect; macos_grace_s: on macOS's own level, which sinks 5
            s after the cause is gone (VM_PRESSURE_DECREASED_SMOOTHING_PERIOD in xnu's kern_memorystatus_notify.c).
        macos_window_s: rates on macOS are taken over at least this long: its counters may be a second old
            (``rate_limit_host_statistics`` in xnu's osfmk/kern/host.c).
        swap_outs, decompressions: pages of 4 KiB a second beside a warning of macOS's that show that memory is short
            now, and not only that much has been compressed: 0.8 and 16 MB. Not measured on a Mac.
        macos_hold_s: how long either must hold; an app that is woken up is a burst.
        calm_s: seconds without any sign before a unit comes back, and between two of them.
        regrow_share: of all units: what comes back at once at most.
        backoff_s, backoff_most_s: how long a level that hurt is not tried again; doubled when it hurts again, and
            ``calm_s`` with it, up to ``calm_most_s``.
        tokens, seconds: how often to look: after either.
    """

    reserve_share: float = 0.03
    reserve_least: int = 64_000_000
    reserve_most: int = 1_000_000_000
    short: float = 2.0
    floor: float = 1 / 2
    critical: float = 1 / 3
    stop: float = 1 / 12
    shrinking: float = 1 / 8
    memory_s: float = 10.0
    window_s: float = 0.5
    faults: float = 200.0
    swap_ins: float = 200.0
    some_stalled: float = 0.10
    full_stalled: float = 0.20
    trace: float = 20.0
    slow: float = 2.0
    slow_sweeps: int = 2
    hold_s: float = 2.0
    shed_share: float = 1 / 4
    ahead_sweeps: float = 2.0
    alert: float = 6.0
    alert_s: float = 0.2
    asked_s: float = 10.0
    grace_s: float = 1.0
    macos_grace_s: float = 6.0
    macos_window_s: float = 2.0
    swap_outs: float = 200.0
    decompressions: float = 4000.0
    macos_hold_s: float = 4.0
    calm_s: float = 10.0
    calm_most_s: float = 60.0
    regrow_share: float = 1 / 4
    backoff_s: float = 30.0
    backoff_most_s: float = 900.0
    tokens: int = 64
    seconds: float = 1.0

    def reserve(self, limit: MemoryLimit) -> int:
        """Bytes of a limit that should stay free."""
        return int(min(max(limit.total * self.reserve_share, self.reserve_least), self.reserve_most))


@dataclass(frozen=True)
class Decision:
    """What to do before the next sweep.

    Attributes:
        level: ``normal``, ``warning`` or ``critical``.
        shed: resident units to give up, the first ones of those that were given to ``check``.
        regrow: units to take back, the first ones of those that were given as shed.
        shrink: bytes to give up of what is not a unit, where no unit is left.
        stop: memory is not enough even without any of them: end the run.
        reason: for the user; empty where nothing is to be said.
    """

    level: str = NORMAL
    shed: int = 0
    regrow: int = 0
    shrink: int = 0
    stop: bool = False
    reason: str = ""
