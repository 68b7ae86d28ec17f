"""Looks at memory while a model runs, and lets resident layers go, or come back, between sweeps."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable

import mlx.core as mx

from ..errors import BudgetError
from ..machine.pressure import GroupAlarm, Pressure, read_pressure
from ..sizes import format_size
from ..text import counted
from .governor import Governor
from .governor_policy import Decision
from .pools import PARTS
from .residency import Residency
from .state import State

ROUND = 2
"""Notes that are kept of what was shed and regrown, the first and the last; a run may be long."""


class Watch:
    """Stands before each forward pass of a streamed model. A model that is all in memory is left as mlx-lm made it:
    there the loop that runs it asks for a look before each pass.

    Args:
        read: what the system says of memory; None: ``read_pressure``.
    """

    def __init__(
        self,
        state: State,
        residency: Residency,
        governor: Governor | None = None,
        read: Callable[[], Pressure] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.state, self.residency = state, residency
        self.governor = governor or Governor()
        self.decisions: list[tuple[int, Decision]] = []
        self._alarm = GroupAlarm() if read is None else None
        if self._alarm is not None:
            weakref.finalize(self, self._alarm.close)
        self._read = read or (lambda: read_pressure(alarm=self._alarm))
        self._clock = clock
        self._passes = 0
        self._since = 0  # passes since the last look
        self._ended = self._seen = 0  # sweeps that have ended, and had at the last look
        self._pending: Decision | None = None  # found in the middle of a sweep
        self.attach()

    def attach(self) -> None:
        """Stand where passes begin, if the model is streamed; else whoever runs it calls ``before_pass``."""
        streaming = self.state.streaming
        if streaming is not None:
            streaming.before_sweep.join(self.before_pass)
            streaming.after_unit.join(self.within_pass)
        self.residency.room = self.room

    def before_pass(self) -> None:
        """Look if it is time to, and do what is to be done.

        Raises:
            BudgetError: memory is not enough even with nothing resident.
        """
        self._passes += 1
        self._since += 1
        self.residency.note_arrivals()
        self._ended += self.state.streaming is not None and self.state.streaming.sweep_s is not None
        decision, self._pending = self._pending, None
        found_before = decision is not None
        if decision is None and self.governor.due(self._clock(), self._since):
            decision = self._look()
        if decision is not None:
            self._act(decision)
        if found_before:
            self.governor.acted(self._clock(), self._read())
            self._seen = self._ended

    def within_pass(self) -> None:
        """In the middle of a sweep, which may take long: look, and act when it is over.

        Raises:
            BudgetError: memory is not enough, and there may be none left when the sweep is over.
        """
        if self._pending is None and self.governor.due(self._clock(), 0):
            decision = self._look(within=True)
            if decision.stop:
                self._act(decision)
            if decision.shed or decision.regrow or decision.shrink:
                self._pending = decision

    def room(self) -> int:
        """Bytes that may still be taken now, with what should stay free left alone; none while macOS warns."""
        return self.governor.growth(self._read())

    def close(self) -> None:
        """Look no more. Safe to call twice."""
        if self._alarm is not None:
            self._alarm.close()

    def _look(self, within: bool = False) -> Decision:
        self._since = 0
        residency, plan, streaming = self.residency, self.state.plan, self.state.streaming
        sweep_s = self._last_sweep()
        prompt = streaming is not None and streaming.sweep_tokens > 1
        timed = streaming is not None and not prompt and plan.calibrated
        own, kept = mx.get_active_memory() + mx.get_cache_memory(), mx.get_cache_memory()
        # What the next prompt will be computed with is free until it comes; while one is computed, it is taken.
        needed = 0 if within and prompt else max(0, plan.activation_bytes - kept)
        return self.governor.check(
            self._clock(),
            self._read(),
            residency.sheddable_bytes,
            residency.returning_bytes,
            sweep_s=sweep_s,
            predicted_s=plan.token_s if timed else None,
            needed=needed,
            promised=max(needed, plan.peak_bytes - plan.allocator_bytes - own),
            own=own,
            spare=residency.spare_bytes,
        )

    def _parts(self, count: int) -> str:
        pools = self.state.plan.pools
        return f"{count} of {PARTS} parts of the experts' memory" if pools else counted(count, "resident layer")

    def _last_sweep(self) -> float | None:
        """Seconds of the sweep that ended since the last look; None: there was none."""
        streaming = self.state.streaming
        if streaming is None or self._ended == self._seen:
            return None
        self._seen = self._ended
        return streaming.sweep_s

    def _act(self, decision: Decision) -> None:
        residency = self.residency
        if decision.stop:
            raise BudgetError(f"memory ran out while the model was running: {decision.reason}")
        what = ""
        if decision.shed:
            residency.shed(decision.shed)
            what = f"{self._parts(decision.shed)} shed"
        elif decision.regrow and residency.widen():
            what = "slots made larger again"
        elif decision.regrow:
            residency.regrow(decision.regrow)
            what = f"{self._parts(decision.regrow)} taken back"
        elif decision.shrink:
            gone = "what drafts given up, for" if residency.draft is not None else "slots made smaller by"
            what = f"{gone} {format_size(residency.shrink(decision.shrink))}"
        if not what:
            return
        self.decisions.append((self._passes, decision))
        note = f"pass {self._passes}: {what}: {decision.reason}"
        kept = [n for n in self.state.notes if n.startswith("pass ")]
        if len(kept) >= 2 * ROUND:
            self.state.notes = tuple(n for n in self.state.notes if n != kept[ROUND])
        self.state.notes = (*self.state.notes, note)
