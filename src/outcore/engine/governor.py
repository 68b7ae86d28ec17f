"""How many bytes a model may hold now: readings in, one number out.

The caller gives the time and what was read, gives memory up or takes it back between passes until it holds that many
bytes, and comes back. Nothing is read or slept here, and no layer is touched.

    room is short        what is missing goes at once, with what others took of late, which they may take again
    memory is paged      a quarter of what can go goes, and more once a pass has shown what that did
    macOS warns          the same, once: the warning is a ratio that resident weights move themselves, and lasts long
                         after (``warning_room``). While it lasts nothing comes back
    out of memory, or    everything that can go goes
    everything waits
    calm for a while     a quarter comes back at a time, as far as there is room twice over; the while doubles each time
                         that what came back had to go again
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from ..machine import mac
from ..machine.memory import MemoryLimit
from ..machine.pressure import Pressure
from ..sizes import format_size

RESERVE = (0.03, 64_000_000, 1_000_000_000)
"""What should stay free of a limit: a share of it, the least and the most bytes; chosen. At half of it layers go."""

SHARE = 1 / 4
"""Of what can go, how much goes or comes back at once where nothing says how much is missing."""

LOOK_S, ALERT_S, TOKENS = 1.0, 0.2, 64
"""Seconds, or tokens, between two looks; seconds where less than ``NEAR`` reserves are free. A look takes 0.8 ms."""

NEAR = 6

CALM_S, MOST_CALM_S = 10.0, 900.0
"""Seconds without a sign before something comes back: at first, and after it had to go again many times."""

STARVED = 1 / 12
"""Of the reserve: with less, and nothing left to give up, a run that once had more ends rather than being killed."""


WINDOW_S = 2.0
"""Seconds that a rate is taken over at least: one fault in a millisecond is not a thousand a second."""

HOLD_S = 4.0
"""Seconds for which paging shows before it counts: libraries being loaded, or an app that wakes up, are a burst."""

PAGING = 200.0
"""Major faults, or pages of 4 KiB swapped in, a second: 2 % of the time on a disk that answers in 0.1 ms."""

STALLED = 0.10
"""Share of the time in which some task waited for memory. Alone it means nothing: cached reads in a group that page
cache fills stall 25 % of the time (measured, cgroup v1), and nothing is wrong."""


@dataclass(frozen=True)
class Decision:
    """How many bytes may be held now.

    Attributes:
        held: bytes that are held. target: bytes that may be.
        reason: for the user, where they differ or the run has to end.
        stop: memory is not enough with nothing left to give up.
    """

    held: int
    target: int
    reason: str = ""
    stop: bool = False


def reserve(limit: MemoryLimit) -> int:
    """Bytes of a limit that should stay free."""
    share, least, most = RESERVE
    return int(min(max(limit.total * share, least), most))


def room(limits: Sequence[MemoryLimit]) -> int:
    """Bytes that can be taken without coming near any limit."""
    return min(x.available - reserve(x) for x in limits)


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


class Governor:
    """Decides for one model while it runs. Not for several threads at once."""

    def __init__(self) -> None:
        self._signs = Signs()
        self._seen: deque[tuple[float, int, dict[str, int]]] = deque()  # lately: bytes held, and free of each limit
        self._checked: float | None = None  # when last
        self._alert = False
        self._swept = True  # a pass has ended since memory was given up last
        self._pass_s = 0.0  # of the last one
        self._shed_at: float | None = None
        self._grown = False  # since memory was given up last
        self._calm_s = CALM_S
        self._calm_since: float | None = None
        self._answered = False  # macOS's warning
        self._had_room = False
        self._starved: tuple[float, int] | None = None  # since when, and what was free then

    def growth(self, pressure: Pressure) -> int:
        """Bytes that may be taken for what was not there before: none while macOS warns."""
        free = room(pressure.limits)
        return min(0, free) if _warns(pressure) else free

    def due(self, now: float, tokens: int) -> bool:
        """Whether it is time to look again, ``tokens`` after the last look."""
        if self._checked is None or tokens >= TOKENS:
            return True
        return now - self._checked >= (ALERT_S if self._alert else LOOK_S)

    def decide(
        self,
        now: float,
        pressure: Pressure,
        held: int,
        spare: int,
        away: Sequence[int] = (),
        *,
        pass_s: float | None = None,
        needed: int = 0,
        promised: int = 0,
    ) -> Decision:
        """How many bytes may be held.

        Args:
            now: seconds of a clock that only goes forward.
            held: bytes that this model holds now: what others take is the rest of what is used.
            spare: of these, bytes that can be given up.
            away: bytes of each part that was given up and could come back.
            pass_s: seconds of the pass that ended since the last look; None: none did.
            needed: bytes that a pass allocates and frees again, which are free at the time of reading.
            promised: bytes that the plan will come to hold, those included, and does not hold yet.
        """
        limit = min(pressure.limits, key=lambda x: (x.available - 2 * reserve(x), x.total))
        wanted, free = reserve(limit), limit.available - needed
        self._pass_s = self._pass_s if pass_s is None else pass_s
        again = self._taken_lately(now, pressure, held, limit.source)
        self._signs.read(now, pressure, any(x.available < 2 * reserve(x) for x in pressure.limits))
        self._checked, self._swept = now, self._swept or pass_s is not None
        self._had_room = self._had_room or limit.available >= STARVED * wanted
        if self._shed_at is not None and now - self._shed_at >= 2 * MOST_CALM_S:
            self._calm_s, self._grown = CALM_S, False  # it hurt long ago
        missing, why = self._missing(now, pressure, limit, free, again, spare, sum(away))
        self._alert = free < NEAR * wanted or bool(missing)
        if why:
            self._calm_since = None
            why = f"{why}; {format_size(max(0, free))} of {format_size(limit.total)} are free ({limit.source})"
        if missing and not spare:
            return Decision(held, held, why, stop=self._hopeless(now, limit, again))
        self._starved = None
        if why:
            return Decision(held, held - min(missing, spare), why)
        return Decision(
            held, held + self._growth(now, pressure, spare, away, max(needed, promised)), "there is room again"
        )

    def acted(self, now: float, pressure: Pressure, decision: Decision) -> None:
        """A decision has been carried out: it shows from now on what that did."""
        self._signs.start_over(now, pressure)
        if decision.target > decision.held:
            self._grown, self._answered, self._calm_since = True, False, now
            return
        if self._grown:
            self._calm_s = min(2 * self._calm_s, MOST_CALM_S)
        self._grown = self._swept = False
        self._shed_at, self._calm_since = now, None
        self._answered = self._answered or _warns(pressure)

    def _missing(
        self, now: float, pressure: Pressure, limit: MemoryLimit, free: int, again: int, spare: int, away: int
    ) -> tuple[int, str]:
        """Bytes that have to go now, and why; no bytes with a reason: something is wrong, and has been answered."""
        signs, wanted, all_of_it = self._signs, reserve(limit), max(1, spare)
        if signs.gone_wrong:
            return all_of_it, signs.gone_wrong
        if pressure.macos_level == mac.CRITICAL:
            return all_of_it, "macOS says that memory pressure is critical"
        if signs.drowning and not self._grown:  # else it goes with what came back
            return all_of_it, "memory is being paged, and all work waits for it"
        if free - again < wanted / 2:
            taken = f", and others have taken {format_size(again)} of late" if again > wanted / 8 else ""
            return wanted + again - free, f"{format_size(wanted)} should be free{taken}"
        if signs.paging:
            why = "memory is being paged"
        elif _warns(pressure):
            why = "macOS warns of memory pressure"
            if self._answered:
                return 0, why
        else:
            return 0, ""
        settled = self._shed_at is None or (self._swept and now - self._shed_at >= WINDOW_S)
        return (max(1, int((spare + away) * SHARE)) if settled else 0), why

    def _taken_lately(self, now: float, pressure: Pressure, held: int, source: str) -> int:
        """Bytes that others took of a limit within the time that giving memory up may take to show.

        A limit that this model's memory does not count against (a GPU's is not the machine's) does not change when
        layers go, so others take what both differences show.
        """
        while self._seen and now - self._seen[0][0] > 2 * self._pass_s + LOOK_S:
            self._seen.popleft()
        free = {x.source: x.available for x in pressure.limits}
        lost = [(was[source] - free[source], before - held) for _, before, was in self._seen if source in was]
        self._seen.append((now, held, free))
        return max([0, *(min(less, less + given) for less, given in lost)])

    def _hopeless(self, now: float, limit: MemoryLimit, again: int) -> bool:
        """Whether the run has to end. One that began with as little room as this goes on, for it may be enough."""
        free = limit.available
        low = free < STARVED * reserve(limit)
        if not self._had_room or not (low or free < again):
            self._starved = None
            return False
        since, then = self._starved = self._starved or (now, free)
        # There may be no time for another look where others go on taking.
        return now - since >= LOOK_S if low else now - since >= 2 * ALERT_S and free < then

    def _growth(self, now: float, pressure: Pressure, spare: int, away: Sequence[int], promised: int) -> int:
        """Bytes that may come back."""
        if not self._signs.calm:
            self._calm_since = None
        elif self._calm_since is None:
            self._calm_since = now
        calm_s = CALM_S if self._grown else self._calm_s
        if not away or not self._swept or self._calm_since is None or now - self._calm_since < calm_s:
            return 0
        free = min(x.available - 2 * reserve(x) for x in pressure.limits)
        if pressure.warning_room is not None:
            # What comes back is wired, and a warning that it brings about takes it away again.
            free = min(free, pressure.warning_room)
        growth = min(free - promised, sum(away), max(max(away), int((spare + sum(away)) * SHARE)))
        return growth if growth >= away[0] else 0


def _warns(pressure: Pressure) -> bool:
    """Whether macOS says that memory is short, by however much."""
    return pressure.macos_level in (mac.WARNING, mac.CRITICAL)
