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
from collections.abc import Sequence
from dataclasses import dataclass

from ..machine import mac_memory
from ..machine.memory import MemoryLimit
from ..machine.pressure import Pressure
from ..sizes import format_size
from .governor_policy import CRITICAL, NORMAL, WARNING, Decision, Policy
from .pressure_signs import Signs


@dataclass(frozen=True)
class _Look:
    """What one check goes by. Bytes.

    Attributes:
        limit: that is nearest.
        room: free of it while a sweep holds what it needs.
        reserve: of it that should stay free.
        again: that others have taken of it of late, and may take again.
        gone_wrong: since the last check; empty for nothing.
        asked: the system wants less to be held.
    """

    now: float
    pressure: Pressure
    limit: MemoryLimit
    room: int
    reserve: int
    again: int
    gone_wrong: str
    asked: bool


class Governor:
    """Decides for one model while it runs. Not for several threads at once.

    Attributes:
        ceiling: the number of resident units that hurt last and is not reached again for now; None: all may come back.
    """

    def __init__(self, policy: Policy | None = None) -> None:
        self.policy = policy or Policy()
        self._signs = Signs(self.policy)
        self.ceiling: int | None = None
        self._ceiling_until = 0.0
        self._backoff_s = self.policy.backoff_s
        self._checked: float | None = None  # when last
        self._answered = False  # macOS's warning, since the last regrow
        self._shed_at: float | None = None
        self._calm_since: float | None = None
        self._regrown_at: float | None = None  # since the last shed
        self._sore: int | None = None  # the ceiling, also after it was lifted, unless it was for want of room and once
        self._had_room = False
        self._starved_since: float | None = None
        self._refused: tuple[float, float] | None = None  # first and last time that more was asked for than there is
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
        look = self._look(now, pressure, needed, own, sweep_s, predicted_s)
        room, reserve, again = look.room, look.reserve, look.again
        level, reason, all_go = self._level(look)
        warned = level == NORMAL and pressure.macos_level == mac_memory.WARNING
        if warned:
            level, reason = WARNING, self._warning(room, look.limit)
        patient = warned and self._answered and self._signs.squeezed_s < policy.macos_hold_s
        self._checked = now
        self._alert = room < policy.alert * reserve or (level != NORMAL and not patient)
        self._signs.note_room(now, look.limit.available)
        self._had_room = self._had_room or look.limit.available >= policy.stop * reserve
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
            return self._starve(look, level, reason, missing, spare)
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
        self._signs.answered(pressure)
        calm = self._calm_since
        self._start_over(now, pressure)
        self._calm_since = None if calm is None else now

    def _look(
        self, now: float, pressure: Pressure, needed: int, own: int, sweep_s: float | None, predicted_s: float | None
    ) -> _Look:
        policy, signs = self.policy, self._signs
        limit = min(pressure.limits, key=lambda x: (x.available - policy.short * policy.reserve(x), x.total))
        gone_wrong, asked = signs.read(now, pressure)
        signs.note_sweep(sweep_s, predicted_s)
        self._forget(now)
        again = signs.taken_lately(now, pressure, own, limit.source)
        return _Look(now, pressure, limit, limit.available - needed, policy.reserve(limit), again, gone_wrong, asked)

    def _level(self, look: _Look) -> tuple[str, str, bool]:
        """The level, why, and whether all units have to go."""
        policy, rates = self.policy, self._signs.rates
        room, reserve, again = look.room, look.reserve, look.again
        free = _free(room, look.limit)
        wanted = f"{format_size(reserve)} should be"
        paging = f"{rates.faults:.0f} major page faults and {rates.swap_ins:.0f} pages swapped in a second"
        if look.gone_wrong:
            return CRITICAL, f"{look.gone_wrong}; {free}", True
        if look.pressure.macos_level == mac_memory.CRITICAL:
            return CRITICAL, f"macOS says that memory pressure is critical; {free}", True
        paged = self._signs.paging_s >= policy.hold_s
        # Paging that a regrow has just brought about goes with what came back.
        tried = self._regrown_at is not None and look.now - self._regrown_at < policy.calm_most_s
        if paged and rates.full >= policy.full_stalled and not tried:
            waits = f"all work waits for it {rates.full:.0%} of the time"
            return CRITICAL, f"memory is being paged, and {waits}; {free}", True
        if room < policy.critical * reserve:
            return CRITICAL, f"only {free}, {wanted}", False
        if room < policy.floor * reserve or (room < reserve and self._signs.shrinking(look.limit.available, reserve)):
            return WARNING, f"only {free}, {wanted}", False
        if again > policy.shrinking * reserve and room - again < policy.floor * reserve:
            return WARNING, f"only {free}, and others have taken {format_size(again)} of late", False
        if look.asked:
            return WARNING, f"the control group is to be smaller than what it holds; {free}", False
        if paged:
            return WARNING, f"memory is being paged: {paging}; {free}", False
        if self._signs.thrashing(look.pressure):
            slow = f"sweeps take over {policy.slow:g} times as long as predicted"
            return WARNING, f"{slow}, with {paging}; {free}", False
        return NORMAL, "", False

    def _warning(self, room: int, limit: MemoryLimit) -> str:
        out, back = self._signs.rates.swap_outs, self._signs.rates.decompressions
        paging = f"{out:.0f} pages swapped out and {back:.0f} decompressed a second"
        return f"macOS warns of memory pressure, with {paging}; {_free(room, limit)}"

    # Shedding

    def _settled(self, now: float, warned: bool) -> bool:
        """The last shed has had time to show what it did; more of it where nothing but macOS's level shows it."""
        grace_s = self.policy.macos_grace_s if warned else self.policy.grace_s
        return self._shed_at is None or (self._signs.swept and now - self._shed_at >= grace_s)

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
        """The number of residents changes."""
        self._signs.start_over(now, pressure)
        self._calm_since = None

    def _starve(self, look: _Look, level: str, reason: str, missing: int, spare: int) -> Decision:
        """No unit is left to give up. A run that began with as little room as this goes on, for it may be enough."""
        policy, now, asked = self.policy, look.now, look.asked
        # All of it: what the next prompt needs is not needed for this one.
        room = look.limit.available
        if spare > 0 and (asked or missing > 0):
            if not self._settled(now, False):
                return Decision(level, reason=reason)
            self._hurt(now, look.pressure, 0)
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
        if look.again > room and self._signs.taking_on:
            # It goes on, and there may be no time for another look.
            return Decision(level, stop=True, reason=end)
        if room >= policy.stop * look.reserve:
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
        if not self._signs.calm():
            self._calm_since = None
            return Decision()
        if self._calm_since is None:
            self._calm_since = now
        calm_s = min(self.policy.calm_s * self._backoff_s / self.policy.backoff_s, self.policy.calm_most_s)
        if not shed or not self._signs.swept or now - self._calm_since < calm_s:
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
