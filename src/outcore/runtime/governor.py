"""When to give resident units up, and when to take them back: readings in, decisions out.

A state machine: the caller gives the time and what was read, sheds or regrows between sweeps what the decision says,
and comes back. Nothing is read or slept here, and no unit is touched.

    normal    room, and no paging: after a calm while, units come back, one or a few at a time
    warning   room is short and shrinking, or will be if others take as much again: as many units go as are missing; two
              signs of paging at once, or the system asks: a quarter of the units goes. Then nothing more until a sweep
              has shown what that did. macOS's own warning is answered once; while it goes on nothing comes back, and
              more goes only where pages are being swapped out or decompressed
    critical  almost no room: as many units go at once as bring it back, with more to spare; an out-of-memory event, or
              everything waits for memory: all units go

Each unit that goes too many costs speed until it has come back: where it is known how much is missing, that much goes.

macOS warns by a ratio that resident weights move themselves, and goes on warning long after (`mac_memory`): it says
that no more should be taken, not that what is there is too much.

No sign of paging counts alone. Page faults come from libraries being loaded, stalls and swapping from a neighbour, a
slow sweep from a slow disk, a limit that is reached from page cache. Two of them at once come from memory.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..sizes import format_size
from ..system import mac_memory
from ..system.memory import MemoryLimit
from ..system.pressure import Pressure, Stall
from .governor_policy import CRITICAL, NORMAL, WARNING, Decision, Policy


@dataclass(frozen=True)
class _Rates:
    """What two readings differ by. A second, or a share of time."""

    faults: float = 0.0
    swap_ins: float = 0.0
    swap_outs: float = 0.0
    decompressions: float = 0.0
    some: float = 0.0
    full: float = 0.0


class Governor:
    """Decides for one model while it runs. Not for several threads at once.

    Attributes:
        ceiling: the number of resident units that hurt last and is not reached again for now; None: all may come back.
    """

    def __init__(self, policy: Policy | None = None) -> None:
        self.policy = policy or Policy()
        self.ceiling: int | None = None
        self._ceiling_until = 0.0
        self._backoff_s = self.policy.backoff_s
        self._checked: float | None = None  # when last
        self._base: tuple[float, Pressure] | None = None  # rates run from here
        self._events: Pressure | None = None  # the reading before, for events
        self._rates = _Rates()
        self._paging_s = 0.0  # for how long there have been signs of paging
        self._slow = 0  # sweeps in a row
        self._answered = False  # macOS's warning, since the last regrow
        self._squeezed_s = 0.0  # for how long macOS has been swapping out or decompressing
        self._room: deque[tuple[float, int]] = deque()
        self._shed_at: float | None = None
        self._swept = True  # a sweep was seen since the last shed or regrow
        self._calm_since: float | None = None
        self._regrown_at: float | None = None  # since the last shed
        self._sore: int | None = None  # the ceiling, also after it was lifted, unless it was for want of room and once
        self._had_room = False
        self._starved_since: float | None = None
        self._refused: tuple[float, float] | None = None  # first and last time that more was asked for than there is
        self._taken: deque[tuple[float, dict[str, int], int]] = deque()  # used of each limit, and by ourselves
        self._highs: deque[float] = deque()  # when others took more than ever
        self._highest: tuple[str, int, int] | None = None
        self._sweep_s = 0.0
        self._alert = False

    def room(self, limits: Sequence[MemoryLimit]) -> int:
        """Bytes that can be taken without coming near any limit."""
        return min(x.available - self.policy.reserve(x) for x in limits)

    def growth(self, pressure: Pressure) -> int:
        """Bytes that may be taken for what was not there before: none while macOS warns."""
        room = self.room(pressure.limits)
        return min(0, room) if _warns(pressure) else room

    def due(self, now: float, tokens: int) -> bool:
        """Whether it is time to look again, ``tokens`` after the last ``check``."""
        if self._checked is None or tokens >= self.policy.tokens:
            return True
        return now - self._checked >= (self.policy.alert_s if self._alert else self.policy.seconds)

    def check(
        self,
        now: float,
        pressure: Pressure,
        resident: Sequence[int],
        shed: Sequence[int] = (),
        *,
        sweep_s: float | None = None,
        predicted_s: float | None = None,
        needed: int = 0,
        promised: int = 0,
        own: int = 0,
        spare: int = 0,
    ) -> Decision:
        """Decide what to do before the next sweep.

        Args:
            now: seconds of a clock that only goes forward.
            resident: bytes of each unit that can be given up, the first to go first.
            shed: bytes of each unit that was given up, the first to come back first.
            sweep_s: seconds of the sweep since the last check, or of the mean one; None: there was none.
            predicted_s: what it should have taken with these residents; None: not known, or not from measurements of
                this machine.
            needed: bytes that a sweep allocates and frees again, which are free at the time of reading.
            promised: bytes that the plan will come to hold, those included, and does not hold yet.
            own: bytes that this model holds now: what others take is the rest of what is used.
            spare: bytes that can be given up beside units, when none is left.
        """
        policy = self.policy
        limit = min(pressure.limits, key=lambda x: (x.available - policy.short * policy.reserve(x), x.total))
        reserve, room = policy.reserve(limit), limit.available - needed
        gone_wrong, asked = self._read(now, pressure)
        self._note_sweep(sweep_s, predicted_s)
        self._forget(now)
        again = self._taken_lately(now, pressure, own, limit.source)
        level, reason, all_go = self._level(now, pressure, limit, room, reserve, again, gone_wrong, asked)
        warned = level == NORMAL and pressure.macos_level == mac_memory.WARNING
        if warned:
            level, reason = WARNING, self._warning(room, limit)
        patient = warned and self._answered and self._squeezed_s < policy.macos_hold_s
        self._checked = now
        self._alert = room < policy.alert * reserve or (level != NORMAL and not patient)
        while len(self._room) > 1 and now - self._room[0][0] > policy.memory_s:
            self._room.popleft()
        self._room.append((now, limit.available))
        self._had_room = self._had_room or limit.available >= policy.stop * reserve
        if level == NORMAL:
            self._starved_since = None
            return self._regrow(now, pressure, resident, shed, max(needed, promised))
        self._calm_since = None
        if patient:
            self._starved_since = None
            return Decision(level, reason=reason)
        missing = reserve + again - room
        if level == CRITICAL:
            # What was missed once may be missed again.
            missing += int(policy.short * reserve) - reserve + again
        if not resident:
            return self._starve(now, level, reason, limit.available, reserve, again, asked, missing, spare, pressure)
        if level == WARNING and not self._settled(now, warned):
            return Decision(level, reason=reason)
        count = len(resident)
        if not all_go:
            # Paging and requests do not say how much is missing.
            least = 0.0 if room < reserve + again else (len(resident) + len(shed)) * policy.shed_share
            count = _enough(resident, math.ceil(least), missing)
        self._answered = self._answered or _warns(pressure)
        self._hurt(now, pressure, len(resident), by_room=room < reserve + again)
        return Decision(level, shed=count, reason=reason)

    def acted(self, now: float, pressure: Pressure) -> None:
        """A decision found in the middle of a sweep has been carried out: it shows from now on what that did."""
        if self._shed_at is not None and self._regrown_at is None:
            self._shed_at = now
        if self._events is not None:
            self._events = replace(self._events, alarms=pressure.alarms)
        calm = self._calm_since
        self._start_over(now, pressure)
        self._calm_since = None if calm is None else now

    # Signs

    def _read(self, now: float, pressure: Pressure) -> tuple[str, bool]:
        """Take a reading's counters in; returns what has gone wrong since the last, and whether less is asked for."""
        before, self._events = self._events or pressure, pressure
        if self._base is None:
            self._base = (now, pressure)
        began, base = self._base
        seconds = now - began
        if seconds >= (self.policy.window_s if pressure.macos_level is None else self.policy.macos_window_s):
            self._base = (now, pressure)
            self._rates = rates = _Rates(
                faults=max(0, pressure.major_faults - base.major_faults) / seconds,
                swap_ins=_rate(base.swap_ins, pressure.swap_ins, seconds),
                swap_outs=_rate(base.swap_outs, pressure.swap_outs, seconds),
                decompressions=_rate(base.decompressions, pressure.decompressions, seconds),
                some=_stalled(base.some, pressure.some, seconds),
                full=_stalled(base.full, pressure.full, seconds),
            )
            self._paging_s = self._paging_s + seconds if self._signs(pressure) else 0.0
            squeezed = rates.swap_outs >= self.policy.swap_outs or rates.decompressions >= self.policy.decompressions
            on_mac = pressure.macos_level is not None
            self._squeezed_s = self._squeezed_s + seconds if on_mac and squeezed else 0.0
        was, events = before.events, pressure.events
        asked = (pressure.alarms or 0) > (before.alarms or 0)
        if events.oom_kill > was.oom_kill:
            return "the kernel has ended a process of this control group for want of memory", asked
        if events.oom > was.oom:
            return "the control group ran out of memory", asked
        return "tasks of the control group wait for memory that is not there" if events.under_oom else "", asked

    def _short(self, pressure: Pressure) -> bool:
        return any(x.available < self.policy.short * self.policy.reserve(x) for x in pressure.limits)

    def _signs(self, pressure: Pressure) -> bool:
        policy, rates = self.policy, self._rates
        faulting, short = rates.faults >= policy.faults, self._short(pressure)
        swapping, stalled = rates.swap_ins >= policy.swap_ins, rates.some >= policy.some_stalled
        # Stalls and short room are not enough: cached reads in a group that page cache fills stall 25 % of the time
        # (measured, cgroup v1), and nothing is wrong.
        return (faulting and (swapping or stalled or short)) or (swapping and short)

    def _note_sweep(self, sweep_s: float | None, predicted_s: float | None) -> None:
        if sweep_s is None:
            return
        self._swept, self._sweep_s = True, sweep_s
        if predicted_s is not None:
            self._slow = self._slow + 1 if sweep_s > self.policy.slow * predicted_s else 0

    def _thrashing(self, pressure: Pressure) -> bool:
        """Sweeps are slow, and paging explains it: on a hard disk a hundred faults are a second."""
        rates, trace = self._rates, self.policy.trace
        elsewhere = rates.swap_ins >= trace or rates.some >= self.policy.some_stalled / 10
        slow = self._slow >= self.policy.slow_sweeps
        return slow and rates.faults >= trace and (elsewhere or self._short(pressure))

    def _level(
        self, now: float, pressure: Pressure, limit: MemoryLimit, room: int, reserve: int, again: int,
        gone_wrong: str, asked: bool,
    ) -> tuple[str, str, bool]:  # fmt: skip
        """The level, why, and whether all units have to go."""
        policy, rates = self.policy, self._rates
        free = _free(room, limit)
        wanted = f"{format_size(reserve)} should be"
        paging = f"{rates.faults:.0f} major page faults and {rates.swap_ins:.0f} pages swapped in a second"
        if gone_wrong:
            return CRITICAL, f"{gone_wrong}; {free}", True
        if pressure.macos_level == mac_memory.CRITICAL:
            return CRITICAL, f"macOS says that memory pressure is critical; {free}", True
        paged = self._paging_s >= policy.hold_s
        # Paging that a regrow has just brought about goes with what came back.
        tried = self._regrown_at is not None and now - self._regrown_at < policy.calm_most_s
        if paged and rates.full >= policy.full_stalled and not tried:
            waits = f"all work waits for it {rates.full:.0%} of the time"
            return CRITICAL, f"memory is being paged, and {waits}; {free}", True
        if room < policy.critical * reserve:
            return CRITICAL, f"only {free}, {wanted}", False
        if room < policy.floor * reserve or (room < reserve and self._shrinking(limit.available, reserve)):
            return WARNING, f"only {free}, {wanted}", False
        if again > policy.shrinking * reserve and room - again < policy.floor * reserve:
            return WARNING, f"only {free}, and others have taken {format_size(again)} of late", False
        if asked:
            return WARNING, f"the control group is to be smaller than what it holds; {free}", False
        if paged:
            return WARNING, f"memory is being paged: {paging}; {free}", False
        if self._thrashing(pressure):
            slow = f"sweeps take over {policy.slow:g} times as long as predicted"
            return WARNING, f"{slow}, with {paging}; {free}", False
        return NORMAL, "", False

    def _warning(self, room: int, limit: MemoryLimit) -> str:
        out, back = self._rates.swap_outs, self._rates.decompressions
        paging = f"{out:.0f} pages swapped out and {back:.0f} decompressed a second"
        return f"macOS warns of memory pressure, with {paging}; {_free(room, limit)}"

    def _taken_lately(self, now: float, pressure: Pressure, own: int, source: str) -> int:
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

    def _shrinking(self, available: int, reserve: int) -> bool:
        return any(before - available > self.policy.shrinking * reserve for _, before in self._room)

    # Shedding

    def _settled(self, now: float, warned: bool) -> bool:
        """The last shed has had time to show what it did; more of it where nothing but macOS's level shows it."""
        grace_s = self.policy.macos_grace_s if warned else self.policy.grace_s
        return self._shed_at is None or (self._swept and now - self._shed_at >= grace_s)

    def _hurt(self, now: float, pressure: Pressure, units: int, by_room: bool = True) -> None:
        """``units`` residents were too many: for the room there is, which says itself when there is more, or else."""
        again = self._regrown_at is not None
        if again:
            self._backoff_s = min(2 * self._backoff_s, self.policy.backoff_most_s)
        self.ceiling = units if self.ceiling is None else min(self.ceiling, units)
        self._ceiling_until = now + self._backoff_s
        if again or not by_room:
            self._sore = self.ceiling
        self._regrown_at, self._shed_at = None, now
        self._start_over(now, pressure)

    def _start_over(self, now: float, pressure: Pressure) -> None:
        """The number of residents changes: what was read before says nothing about what comes."""
        self._base, self._rates = (now, pressure), _Rates()
        self._paging_s, self._squeezed_s, self._slow = 0.0, 0.0, 0
        self._swept = False
        self._calm_since = None

    def _starve(
        self, now: float, level: str, reason: str, room: int, reserve: int, again: int, asked: bool, missing: int,
        spare: int, pressure: Pressure,
    ) -> Decision:  # fmt: skip
        """No unit is left to give up. A run that began with as little room as this goes on, for it may be enough.

        ``room`` is all of it: what the next prompt needs is not needed for this one.
        """
        policy = self.policy
        if spare > 0 and (asked or missing > 0):
            if not self._settled(now, False):
                return Decision(level, reason=reason)
            self._hurt(now, pressure, 0)
            return Decision(level, shrink=min(spare, max(missing, int(spare * policy.shed_share))), reason=reason)
        end = f"{reason}; no resident layer is left to give up"
        if asked:
            goes_on = self._refused is not None and now - self._refused[1] < policy.asked_s / 2
            self._refused = (self._refused[0] if self._refused is not None and goes_on else now, now)
            if now - self._refused[0] >= policy.asked_s:
                return Decision(level, stop=True, reason=end)
        if level != CRITICAL or not self._had_room:
            self._starved_since = None
            return Decision(level, reason=reason)
        if again > room and len(self._highs) > 1:
            # It goes on, and there may be no time for another look.
            return Decision(level, stop=True, reason=end)
        if room >= policy.stop * reserve:
            self._starved_since = None
            return Decision(level, reason=reason)
        if self._starved_since is None:
            self._starved_since = now
        if now - self._starved_since < policy.grace_s:
            return Decision(level, reason=reason)
        return Decision(level, stop=True, reason=end)

    # Regrowing

    def _forget(self, now: float) -> None:
        """What hurt long ago may be tried again."""
        if self.ceiling is not None and now >= self._ceiling_until:
            self.ceiling = None
        if self._shed_at is not None and now - self._shed_at >= 2 * self.policy.backoff_most_s:
            self._backoff_s, self._sore, self._regrown_at = self.policy.backoff_s, None, None
            # A warning that has gone on all the while has had its answer.
            self._answered = self._answered and self._calm_since is None

    def _regrow(
        self, now: float, pressure: Pressure, resident: Sequence[int], shed: Sequence[int], promised: int
    ) -> Decision:
        if not self._calm(pressure):
            self._calm_since = None
            return Decision()
        if self._calm_since is None:
            self._calm_since = now
        calm_s = min(self.policy.calm_s * self._backoff_s / self.policy.backoff_s, self.policy.calm_most_s)
        if not shed or not self._swept or now - self._calm_since < calm_s:
            return Decision()
        most = max(1, int((len(resident) + len(shed)) * self.policy.regrow_share))
        if self._sore is not None:
            # From just below the level that hurt, one at a time.
            most = min(most, max(1, self._sore - 1 - len(resident)))
        if self.ceiling is not None:
            most = min(most, self.ceiling - 1 - len(resident))
        spare = min(x.available - self.policy.short * self.policy.reserve(x) for x in pressure.limits) - promised
        if pressure.warning_room is not None:
            # What comes back is wired, and a warning that it brings about takes it away again.
            spare = min(spare, pressure.warning_room - promised)
        count = 0
        for nbytes in shed[: max(0, most)]:
            if nbytes > spare:
                break
            spare -= nbytes
            count += 1
        if not count:
            return Decision()
        self._regrown_at, self._answered = now, False
        self._start_over(now, pressure)
        self._calm_since = now
        return Decision(regrow=count, reason=f"there is room for {count} more in memory again")

    def _calm(self, pressure: Pressure) -> bool:
        policy, rates = self.policy, self._rates
        quiet = rates.swap_ins < policy.swap_ins and (self._slow == 0 or rates.faults < policy.trace)
        return quiet and not self._paging_s and not self._squeezed_s


def _enough(units: Sequence[int], least: int, missing: int) -> int:
    """How many of the units, ``least`` or more, together have ``missing`` bytes; one at least."""
    count = max(1, min(len(units), least))
    freed = sum(units[:count])
    while freed < missing and count < len(units):
        freed += units[count]
        count += 1
    return count


def _free(room: int, limit: MemoryLimit) -> str:
    return f"{format_size(max(0, room))} of {format_size(limit.total)} are free ({limit.source})"


def _warns(pressure: Pressure) -> bool:
    """Whether macOS says that memory is short, by however much."""
    return pressure.macos_level in (mac_memory.WARNING, mac_memory.CRITICAL)


def _rate(before: int | None, now: int | None, seconds: float) -> float:
    """How many a second, of a counter that may have started again."""
    return max(0, (now or 0) - (before or 0)) / seconds


def _stalled(before: Stall | None, now: Stall | None, seconds: float) -> float:
    """Share of the time between two readings."""
    if before is None or now is None:
        return 0.0
    return min(1.0, max(0, now.total_us - before.total_us) / seconds / 1e6)
