"""The one model that a server has in memory, its counters and its idle time."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field

import mlx.nn as nn

from ..decode.passes import generating
from ..decode.scheduler import Scheduler
from ..engine.session import Session
from ..engine.transport import Leader
from ..machine.allocator import clear_cache


@dataclass
class Loaded:
    """The model that is in memory.

    Attributes:
        sequences: the scheduler, or a ``Leader`` if other ranks have layers of the model.
        keep_s: seconds that it stays loaded without requests; None or negative: for ever, as with other ranks.
        load_s: seconds that loading took; 0 once an answer has reported them.
        idle_at: when its last answer ended, by ``time.monotonic``; None while it answers.
        busy: contexts that hold while it answers.
    """

    name: str
    model: nn.Module
    sequences: Scheduler | Leader
    keep_s: float | None
    load_s: float = 0.0
    idle_at: float | None = field(default_factory=time.monotonic)
    tokens: int = 0
    busy: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @property
    def session(self) -> Session:
        session: Session = self.model.outcore
        return session

    @property
    def leader(self) -> Leader | None:
        return None if isinstance(self.sequences, Scheduler) else self.sequences

    @property
    def counters(self) -> dict[str, int]:
        m, plan = self.session.metrics, self.session.plan
        return {"sweeps": m.sweeps, "bytes_read": m.bytes_read, "tokens": self.tokens, "drafted": m.drafted,
                "accepted": m.accepted, "memory_bytes": plan.peak_bytes, "budget_bytes": plan.budget_bytes}  # fmt: skip

    @property
    def left_s(self) -> float | None:
        """Seconds until it is unloaded unless a request comes; None: it stays, or it answers now."""
        if self.leader is not None or self.keep_s is None or self.keep_s < 0 or self.idle_at is None:
            return None
        return max(0.0, self.idle_at + self.keep_s - time.monotonic())

    def wake(self) -> None:
        if self.idle_at is not None:
            self.idle_at = None
            self.busy.enter_context(generating(self.model))

    def rest(self) -> None:
        self.busy.close()
        self.idle_at = self.idle_at or time.monotonic()
        if self.leader is not None:
            self.leader.rest()
        clear_cache()
