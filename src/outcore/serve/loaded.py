"""The model that a server's engine has in memory, and what else is done on its thread."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.nn as nn

from ..decode.continuous import Continuous
from ..engine.session import Session
from ..engine.transport import Leader
from .choice import Writer


@dataclass
class Loaded:
    """The model that is in memory.

    Attributes:
        sequences: ``Leader``, where other ranks have layers of it.
        load_s: seconds that it took.
        tokens: generated so far.
        awake: it has been asked since it last rested.
        until: when it is unloaded if nobody asks for it, by ``time.monotonic``; None: it stays.
    """

    name: str
    model: nn.Module
    sequences: Continuous | Leader
    load_s: float
    tokens: int = 0
    until: float | None = None
    awake: bool = False
    jobs: dict[int, Writer] = field(default_factory=dict)
    busy: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @property
    def counters(self) -> dict[str, int]:
        """What it has done so far."""
        m = self.session.metrics
        counted = {"sweeps": m.sweeps, "bytes_read": m.bytes_read, "tokens": self.tokens}
        return counted | {"drafted": m.drafted, "accepted": m.accepted}

    @property
    def leader(self) -> Leader | None:
        """What the ranks that share it follow; None: all of it is here."""
        return None if isinstance(self.sequences, Continuous) else self.sequences

    @property
    def session(self) -> Session:
        """What stands behind it."""
        session: Session = self.model.outcore
        return session


@dataclass(frozen=True)
class Call:
    """Something else that is done on the thread, between steps."""

    work: Callable[[], Any]
    done: Callable[[Any], None]
