"""The one model that a server's engine has in memory: what it does, and how long it stays."""

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
        sequences: ``Leader``, where other ranks have layers of it.
        keep_s: seconds that it stays when nobody asks for it; None, or below 0: for good. What ranks share stays so.
        load_s: seconds that loading it took, until an answer has told of them.
        idle_at: when it was asked last, by ``time.monotonic``; None: it is asked now.
        tokens: generated so far.
        busy: what holds while it is asked.
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
        """What stands behind it."""
        session: Session = self.model.outcore
        return session

    @property
    def leader(self) -> Leader | None:
        """What the ranks that share it follow; None: all of it is here."""
        return None if isinstance(self.sequences, Scheduler) else self.sequences

    @property
    def counters(self) -> dict[str, int]:
        """What it has done so far, and the bytes of its plan."""
        m, plan = self.session.metrics, self.session.plan
        return {"sweeps": m.sweeps, "bytes_read": m.bytes_read, "tokens": self.tokens, "drafted": m.drafted,
                "accepted": m.accepted, "memory_bytes": plan.peak_bytes, "budget_bytes": plan.budget_bytes}  # fmt: skip

    @property
    def left_s(self) -> float | None:
        """Seconds until it is unloaded if nobody asks for it; None: it stays, or is asked now."""
        if self.leader is not None or self.keep_s is None or self.keep_s < 0 or self.idle_at is None:
            return None
        return max(0.0, self.idle_at + self.keep_s - time.monotonic())

    def wake(self) -> None:
        """It is asked."""
        if self.idle_at is not None:
            self.idle_at = None
            self.busy.enter_context(generating(self.model))

    def rest(self) -> None:
        """Nobody asks it for anything now."""
        self.busy.close()
        self.idle_at = self.idle_at or time.monotonic()
        if self.leader is not None:
            self.leader.rest()
        clear_cache()
