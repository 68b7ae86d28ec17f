"""Decides from readings of memory how many bytes a model may hold.

``Watch`` reads memory, passes the time and the readings to a ``Governor``, and sheds or takes back layers between
passes as it decides. A ``Governor`` reads no memory and no clock, and changes no layer. Its rules:

    room is short        frees the missing bytes at once, plus what other processes took lately and may take again
    memory is paged      frees a quarter of the bytes that can be freed, and all of them if paging goes on after a pass
    macOS warns          frees a quarter, once: resident weights shift the ratio by which it warns, and the warning
                         lasts long after they are freed (``warning_room``). Takes nothing back until it ends
    out of memory        frees everything that can be freed
    calm for a while     takes back a quarter at a time while twice the reserve stays free; the wait doubles each time
                         that memory which was taken back had to be freed again
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx

from ..errors import BudgetError
from ..machine.memory import CRITICAL, WARNING, MemoryLimit, Pressure, read_pressure
from ..plan.plan import Plan
from ..sizes import format_size
from .residency import Residency

if TYPE_CHECKING:
    from .session import Session


# Bytes of a limit to leave free: a share of the limit, and the least and the most bytes (chosen). Layers are shed
# when less than half of that is free.
RESERVE = (0.03, 64_000_000, 1_000_000_000)

# Share of the movable bytes that is freed or taken back at once if no reading says how much is missing.
SHARE = 1 / 4

# Seconds, or passes, between two readings; ``ALERT_S`` when less than ``NEAR`` reserves are free. A reading takes 0.8
# ms.
LOOK_S, ALERT_S, TOKENS = 1.0, 0.2, 64

NEAR = 6

# Seconds without a sign of pressure before something is taken back: at first, and after many failed attempts.
CALM_S, MOST_CALM_S = 10.0, 900.0

# Share of the reserve. If less is free and nothing is left to give up, a run that once had more raises an error
# before the system kills it.
STARVED = 1 / 12


# Shortest time in seconds over which faults are counted: one fault in a millisecond is not a thousand a second.
WINDOW_S = 2.0

# Seconds of paging before it counts: loading libraries, or an app that wakes up, causes short bursts.
HOLD_S = 4.0

# Major faults, or 4 KiB pages swapped in, per second: 2 % of the time on a disk that answers in 0.1 ms.
PAGING = 200.0


@dataclass(frozen=True)
class Decision:
    """How many bytes the model may hold now.

    Attributes:
        held: bytes that it holds.
        target: bytes that it may hold.
        stop: memory is short and nothing is left to give up.
    """

    held: int
    target: int
    reason: str = ""
    stop: bool = False


def reserve(limit: MemoryLimit) -> int:
    share, least, most = RESERVE
    return int(min(max(limit.total * share, least), most))


def room(limits: Sequence[MemoryLimit]) -> int:
    """Returns the bytes that can be taken without touching any limit's reserve."""
    return min(x.available - reserve(x) for x in limits)


class Governor:
    def __init__(self) -> None:
        self._seen: deque[tuple[float, int, Pressure]] = deque()  # recent (time, bytes held, reading)
        self._due_at = -math.inf
        self._window: tuple[float, Pressure] | None = None  # start of the window for rates
        self._paging_s = 0.0  # seconds of paging so far
        self._swapping = False  # whether pages were swapped in during the last window
        self._pass_ended = True  # whether a pass has ended since memory was last given up
        self._pass_s = 0.0  # seconds of the last pass
        self._shed_at: float | None = None
        self._grown = False  # whether memory came back since it was last given up
        self._calm_s = CALM_S
        self._calm_since: float | None = None
        self._answered = False  # whether macOS's warning was acted on
        self._had_room = False
        self._starved: tuple[float, int] | None = None  # since when memory has been too short, and bytes free then

    def growth(self, pressure: Pressure) -> int:
        free = room(pressure.limits)
        return min(0, free) if _warns(pressure) else free

    def due(self, now: float, tokens: int) -> bool:
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
        """Returns how many bytes may be held.

        Args:
            now: seconds of a monotonic clock.
            held: bytes that this model holds, without those of other processes.
            spare: bytes of ``held`` that can be given up.
            away: bytes of each part (layer or expert slot) that was given up and could be taken back.
            pass_s: seconds of the pass that ended since the last reading; None: no pass ended.
            needed: bytes that a pass allocates and frees again; they are free at the time of reading.
            promised: bytes that the plan will hold and does not hold yet, ``needed`` included.
        """
        limit = min(pressure.limits, key=lambda x: (x.available - 2 * reserve(x), x.total))
        wanted, free = reserve(limit), limit.available - needed
        self._pass_s, self._pass_ended = (
            self._pass_s if pass_s is None else pass_s,
            self._pass_ended or pass_s is not None,
        )
        ran_out = _ran_out(self._seen[-1][2] if self._seen else pressure, pressure)
        lately = self._taken_lately(now, pressure, held, limit)
        self._note_paging(now, pressure, limit)
        self._had_room = self._had_room or limit.available >= STARVED * wanted
        if self._shed_at is not None and now - self._shed_at >= 2 * MOST_CALM_S:
            self._calm_s, self._grown, self._shed_at = CALM_S, False, None  # forget old failures
        missing, why = max(1, spare), ran_out
        if not ran_out:
            missing, why = self._missing(now, pressure, limit, free, lately, spare, away)
        self._due_at = now + (ALERT_S if missing or free < NEAR * wanted else LOOK_S)
        if why:
            self._calm_since = None
            why = f"{why}; {format_size(max(0, free))} of {format_size(limit.total)} are free ({limit.source})"
        if missing and not spare:
            return Decision(held, held, why, stop=self._hopeless(now, limit, lately))
        self._starved = None
        if why:
            return Decision(held, held - min(missing, spare), why)
        return Decision(
            held, held + self._growth(now, pressure, limit, spare, away, max(needed, promised)), "there is room again"
        )

    def acted(self, now: float, pressure: Pressure, decision: Decision) -> None:
        """Notes that a decision was carried out, so that later readings are judged by its effect."""
        self._window, self._paging_s = (now, pressure), 0.0
        if decision.target > decision.held:
            self._grown, self._answered, self._calm_since = True, False, now
            return
        if self._grown:
            self._calm_s = min(2 * self._calm_s, MOST_CALM_S)
        self._grown = self._pass_ended = False
        self._shed_at, self._calm_since = now, None
        self._answered = self._answered or _warns(pressure)

    def _missing(
        self,
        now: float,
        pressure: Pressure,
        limit: MemoryLimit,
        free: int,
        lately: int,
        spare: int,
        away: Sequence[int],
    ) -> tuple[int, str]:
        """Returns the bytes to free now and the reason. 0 bytes with a reason: memory was freed for it already, and
        the effect may still have to show."""
        wanted = reserve(limit)
        if pressure.macos_level == CRITICAL:
            return max(1, spare), "macOS says that memory pressure is critical"
        paging = self._paging_s >= HOLD_S
        settled = self._shed_at is None or (self._pass_ended and now - self._shed_at >= WINDOW_S)
        # If memory was taken back since, that may have caused the paging.
        if paging and settled and self._shed_at is not None and not self._grown:
            return max(1, spare), "memory is still being paged"
        if free - lately < wanted / 2:
            taken = f", and others have taken {format_size(lately)} of late" if lately > wanted / 8 else ""
            return wanted + lately - free, f"{format_size(wanted)} should be free{taken}"
        if paging:
            why = "memory is being paged"
        elif _warns(pressure):
            why = "macOS warns of memory pressure"
            if self._answered:
                return 0, why
        else:
            return 0, ""
        return (max(1, int((spare + sum(away)) * SHARE)) if settled else 0), why

    def _note_paging(self, now: float, pressure: Pressure, limit: MemoryLimit) -> None:
        """Updates how long memory has been paged. Two of three signs must agree (faults, swapping, little room), as
        loading a library causes faults too, and other processes swap."""
        began, base = self._window = self._window or (now, pressure)
        if (seconds := now - began) < WINDOW_S:
            return
        self._window = (now, pressure)
        faulting = pressure.major_faults - base.major_faults >= PAGING * seconds
        self._swapping = (pressure.swap_ins or 0) - (base.swap_ins or 0) >= PAGING * seconds
        short = limit.available < 2 * reserve(limit)
        self._paging_s = self._paging_s + seconds if faulting + self._swapping + short >= 2 else 0.0

    def _taken_lately(self, now: float, pressure: Pressure, held: int, limit: MemoryLimit) -> int:
        """Returns how many bytes of ``limit`` other processes took during the last two passes and a second.

        What this model frees may not show in that limit (a GPU's memory is no part of the machine's). So the smaller
        of two estimates is returned, one that counts this model's bytes and one that does not.
        """
        while self._seen and now - self._seen[0][0] > 2 * self._pass_s + LOOK_S:
            self._seen.popleft()
        lately = 0
        for _, before, seen in self._seen:
            for x in seen.limits:
                if x.source == limit.source:
                    less = x.available - limit.available
                    lately = max(lately, min(less, less + before - held))
        self._seen.append((now, held, pressure))
        return lately

    def _hopeless(self, now: float, limit: MemoryLimit, lately: int) -> bool:
        """Whether the run must end for lack of memory. If it never had more room, it goes on: that may be enough."""
        free = limit.available
        low = free < STARVED * reserve(limit)
        if not self._had_room or not (low or free < lately):
            self._starved = None
            return False
        since, then = self._starved = self._starved or (now, free)
        # If other processes keep taking memory, there may be no time for another reading.
        return now - since >= LOOK_S if low else now - since >= 2 * ALERT_S and free < then

    def _growth(
        self, now: float, pressure: Pressure, limit: MemoryLimit, spare: int, away: Sequence[int], promised: int
    ) -> int:
        if self._swapping or self._paging_s:
            self._calm_since = None
        elif self._calm_since is None:
            self._calm_since = now
        calm_s = CALM_S if self._grown else self._calm_s
        if not away or not self._pass_ended or self._calm_since is None or now - self._calm_since < calm_s:
            return 0
        free = limit.available - 2 * reserve(limit)
        if pressure.warning_room is not None:
            # Weights that are taken back are wired, and may cause a warning for which they are shed again.
            free = min(free, pressure.warning_room)
        growth = min(free - promised, sum(away), max(max(away), int((spare + sum(away)) * SHARE)))
        return growth if growth >= away[0] else 0


def _ran_out(before: Pressure, now: Pressure) -> str:
    """Returns a clause for the user that says how memory ran out between two readings; empty if it did not."""
    if now.oom_kill > before.oom_kill:
        return "the kernel killed a process of this control group because memory ran out"
    if now.oom > before.oom:
        return "the control group ran out of memory"
    return "tasks of the control group are waiting for memory" if now.under_oom else ""


def _warns(pressure: Pressure) -> bool:
    return pressure.macos_level in (WARNING, CRITICAL)


NOTES = 4


class Watch:
    """Checks memory before each forward pass. For a fully resident model, whose passes have no hooks, the decoding
    loop calls ``before_pass``.

    Attributes:
        moves: for each change, the number of the pass that follows it, and how many layers or expert slots were taken
            back (negative: shed).
    """

    def __init__(
        self,
        engine: Session,
        residency: Residency,
        governor: Governor | None = None,
        read: Callable[[], Pressure] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine, self.residency = engine, residency
        self.governor = governor or Governor()
        self.moves: list[tuple[int, int]] = []
        self.notes: list[str] = []
        self._read = read or read_pressure
        self._clock = clock
        self._passes = 0
        self._since = 0  # passes since the last reading
        self._ended = False  # whether a pass has ended since the last reading
        self._pending: Decision | None = None  # decided in the middle of a pass
        self._movable: tuple[Plan, object, tuple[int, list[int]]] | None = None
        self.attach()

    def attach(self) -> None:
        """Has a streamed model call ``before_pass`` and ``within_pass``; else the decoding loop calls the former."""
        streaming = self.engine.streaming
        if streaming is not None:
            for calls, mine in ((streaming.before_pass, self.before_pass), (streaming.after_unit, self.within_pass)):
                if mine not in calls:
                    calls.append(mine)
        self.residency.layers.room = self.room

    def before_pass(self) -> None:
        """Checks memory if a check is due, and sheds or takes back. Raises BudgetError if memory is too short even
        with nothing resident."""
        self._passes += 1
        self._since += 1
        if (layers := self.residency.layers).shed_layers:
            layers.note_arrivals()
        self._ended = self._ended or (self.engine.streaming is not None and self.engine.streaming.pass_s is not None)
        decision, self._pending = self._pending, None
        if decision is None and self.governor.due(self._clock(), self._since):
            decision = self._look()
        if decision is not None and (decision.stop or decision.target != decision.held):
            self._act(decision)

    def within_pass(self) -> None:
        """Checks memory in a long pass, to act before the next. Raises BudgetError if memory may run out until then."""
        if self._pending is None and self.governor.due(self._clock(), 0):
            decision = self._look(within=True)
            if decision.stop:
                self._act(decision)
            if decision.target != decision.held:
                self._pending = decision

    def room(self) -> int:
        return self.governor.growth(self._read())

    def _look(self, within: bool = False) -> Decision:
        layers, plan, streaming = self.residency.layers, self.engine.plan, self.engine.streaming
        kept = mx.get_cache_memory()
        held = mx.get_active_memory() + kept
        # Memory for a prompt's activations is free until the prompt comes, and in use while it is computed.
        prompt = within and streaming is not None and streaming.pass_tokens > 1
        needed = 0 if prompt else max(0, plan.activation_bytes - kept)
        pass_s = streaming.pass_s if streaming is not None and self._ended else None
        self._since, self._ended = 0, False
        # Cached, as planning is slow.
        state = len(layers.shed_layers), layers.draft is None, streaming is None
        if self._movable is None or self._movable[0] is not plan or self._movable[1] != state:
            self._movable = plan, state, layers.movable()
        spare, away = self._movable[2]
        return self.governor.decide(
            self._clock(),
            self._read(),
            held,
            spare,
            away,
            pass_s=pass_s,
            needed=needed,
            promised=max(needed, plan.peak_bytes - plan.allocator_bytes - held),
        )

    def _act(self, decision: Decision) -> None:
        if decision.stop:
            raise BudgetError(
                f"memory ran out while the model was running: {decision.reason}; no resident layer is left to give up, "
                "so free memory elsewhere and try again"
            )
        layers, growth = self.residency.layers, decision.target - decision.held
        count, what = layers.give(-growth) if growth < 0 else layers.take(growth)
        if not what:
            return
        self.governor.acted(self._clock(), self._read(), decision)
        self.moves.append((self._passes, -count if growth < 0 else count))
        self.notes = [*self.notes[-NOTES:], f"pass {self._passes}: {what}: {decision.reason}"]
