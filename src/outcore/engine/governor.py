"""How many bytes a model may hold now: readings in, one number out.

The caller gives the time and what was read, gives memory up or takes it back between passes until it holds that many
bytes, and comes back. Nothing is read or slept here, and no layer is touched.

    room is short        what is missing goes at once, with what others took of late, which they may take again
    memory is paged      a quarter of what can go goes, and all of it where a pass shows that this was not enough
    macOS warns          the same, once: the warning is a ratio that resident weights move themselves, and lasts long
                         after (``warning_room``). While it lasts nothing comes back
    out of memory        everything that can go goes
    calm for a while     a quarter comes back at a time, as far as there is room twice over; the while doubles each time
                         that what came back had to go again
"""

from __future__ import annotations

import math
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


class Governor:
    """Decides for one model while it runs. Not for several threads at once."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int, Pressure]] = deque()  # lately: bytes held, and what was read
        self._due_at = -math.inf
        self._window: tuple[float, Pressure] | None = None  # where the rates of this window begin
        self._paging_s = 0.0  # for how long memory has been paged by now
        self._swapping = False  # in the last window
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
        return tokens >= TOKENS or now >= self._due_at

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
        self._pass_s, self._swept = self._pass_s if pass_s is None else pass_s, self._swept or pass_s is not None
        ran_out = _ran_out(self._seen[-1][2] if self._seen else pressure, pressure)
        again = self._taken_lately(now, pressure, held, limit.source)
        self._note_paging(now, pressure)
        self._had_room = self._had_room or limit.available >= STARVED * wanted
        if self._shed_at is not None and now - self._shed_at >= 2 * MOST_CALM_S:
            self._calm_s, self._grown, self._shed_at = CALM_S, False, None  # it hurt long ago
        missing, why = max(1, spare), ran_out
        if not ran_out:
            missing, why = self._missing(now, pressure, limit, free, again, spare, away)
        self._due_at = now + (ALERT_S if missing or free < NEAR * wanted else LOOK_S)
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
        self._window, self._paging_s = (now, pressure), 0.0
        if decision.target > decision.held:
            self._grown, self._answered, self._calm_since = True, False, now
            return
        if self._grown:
            self._calm_s = min(2 * self._calm_s, MOST_CALM_S)
        self._grown = self._swept = False
        self._shed_at, self._calm_since = now, None
        self._answered = self._answered or _warns(pressure)

    def _missing(
        self, now: float, pressure: Pressure, limit: MemoryLimit, free: int, again: int, spare: int, away: Sequence[int]
    ) -> tuple[int, str]:
        """Bytes that have to go now, and why; no bytes with a reason: something is wrong, and has been answered."""
        wanted = reserve(limit)
        if pressure.macos_level == mac.CRITICAL:
            return max(1, spare), "macOS says that memory pressure is critical"
        paging = self._paging_s >= HOLD_S
        settled = self._shed_at is None or (self._swept and now - self._shed_at >= WINDOW_S)
        if paging and settled and self._shed_at is not None and not self._grown:  # else it goes with what came back
            return max(1, spare), "memory is still being paged"
        if free - again < wanted / 2:
            taken = f", and others have taken {format_size(again)} of late" if again > wanted / 8 else ""
            return wanted + again - free, f"{format_size(wanted)} should be free{taken}"
        if paging:
            why = "memory is being paged"
        elif _warns(pressure):
            why = "macOS warns of memory pressure"
            if self._answered:
                return 0, why
        else:
            return 0, ""
        return (max(1, int((spare + sum(away)) * SHARE)) if settled else 0), why

    def _note_paging(self, now: float, pressure: Pressure) -> None:
        """Whether memory is being paged: no sign counts alone, for faults come from libraries and swapping from a
        neighbour."""
        began, base = self._window = self._window or (now, pressure)
        if (seconds := now - began) < WINDOW_S:
            return
        self._window = (now, pressure)
        faulting = pressure.major_faults - base.major_faults >= PAGING * seconds
        self._swapping = (pressure.swap_ins or 0) - (base.swap_ins or 0) >= PAGING * seconds
        short = any(x.available < 2 * reserve(x) for x in pressure.limits)
        self._paging_s = self._paging_s + seconds if faulting + self._swapping + short >= 2 else 0.0

    def _taken_lately(self, now: float, pressure: Pressure, held: int, source: str) -> int:
        """Bytes that others took of a limit within the time that giving memory up may take to show.

        A limit that this model's memory does not count against (a GPU's is not the machine's) does not change when
        layers go, so others take what both differences show.
        """
        while self._seen and now - self._seen[0][0] > 2 * self._pass_s + LOOK_S:
            self._seen.popleft()
        free = next(x.available for x in pressure.limits if x.source == source)
        lost = [
            (x.available - free, before - held) for _, before, p in self._seen for x in p.limits if x.source == source
        ]
        self._seen.append((now, held, pressure))
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
        if self._swapping or self._paging_s:
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


def _ran_out(before: Pressure, now: Pressure) -> str:
    """How memory has run out since a reading, for the user; empty for not."""
    if now.oom_kill > before.oom_kill:
        return "the kernel has ended a process of this control group for want of memory"
    if now.oom > before.oom:
        return "the control group ran out of memory"
    return "tasks of the control group wait for memory that is not there" if now.under_oom else ""


def _warns(pressure: Pressure) -> bool:
    """Whether macOS says that memory is short, by however much."""
    return pressure.macos_level in (mac.WARNING, mac.CRITICAL)
