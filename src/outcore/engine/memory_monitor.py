"""Checks memory while a model runs and sheds or regrows resident layers between passes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import mlx.core as mx

from ..errors import BudgetError
from ..machine.memory import Pressure, read_pressure
from .governor import Decision, Governor
from .residency import Residency

if TYPE_CHECKING:
    from .session import Session

NOTES = 4


class Watch:
    """Checks memory before each forward pass. A fully resident model has no hook: its decoding loop calls
    ``before_pass``.

    Attributes:
        moves: the pass before each action, and how many layers or expert slots came back (negative: went).
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
        self._ended = False  # whether a pass has since the last reading
        self._pending: Decision | None = None  # decided in the middle of a pass
        self.attach()

    def attach(self) -> None:
        """Registers with a streamed model's passes; otherwise the decoding loop calls ``before_pass``."""
        streaming = self.engine.streaming
        if streaming is not None:
            for calls, mine in ((streaming.before_pass, self.before_pass), (streaming.after_unit, self.within_pass)):
                if mine not in calls:
                    calls.append(mine)
        self.residency.layers.room = self.room

    def before_pass(self) -> None:
        """Checks memory if it is time to, and acts. Raises BudgetError if it is too short even with nothing
        resident."""
        self._passes += 1
        self._since += 1
        self.residency.layers.note_arrivals()
        self._ended = self._ended or (self.engine.streaming is not None and self.engine.streaming.pass_s is not None)
        decision, self._pending = self._pending, None
        if decision is None and self.governor.due(self._clock(), self._since):
            decision = self._look()
        if decision is not None and (decision.stop or decision.target != decision.held):
            self._act(decision)

    def within_pass(self) -> None:
        """Checks memory during a long pass, to act after it. Raises BudgetError if memory may run out before that."""
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
        # Activations of a prompt are free memory until it comes, and in use while it is computed.
        prompt = within and streaming is not None and streaming.pass_tokens > 1
        needed = 0 if prompt else max(0, plan.activation_bytes - kept)
        pass_s = streaming.pass_s if streaming is not None and self._ended else None
        self._since, self._ended = 0, False
        spare, away = layers.movable()
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
                f"memory ran out while the model was running: {decision.reason}; no resident layer is left to give up"
            )
        layers, growth = self.residency.layers, decision.target - decision.held
        count, what = layers.give(-growth) if growth < 0 else layers.take(growth)
        if not what:
            return
        self.governor.acted(self._clock(), self._read(), decision)
        self.moves.append((self._passes, -count if growth < 0 else count))
        self.notes = [*self.notes[-NOTES:], f"pass {self._passes}: {what}: {decision.reason}"]
