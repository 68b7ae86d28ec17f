"""The one model that a server's engine has in memory, and how long it stays."""

from __future__ import annotations

import contextlib
import gc
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.nn as nn

from ..decode.continuous import Continuous
from ..decode.passes import generating
from ..engine.session import Session
from ..engine.transport import Leader
from ..machine.allocator import clear_cache
from ..monitoring import publish
from .choice import Writer

log = logging.getLogger("outcore.serve")


@dataclass
class Loaded:
    """The model that is in memory.

    Attributes:
        sequences: ``Leader``, where other ranks have layers of it.
        load_s: seconds that it took.
        keep_s: seconds that it stays when nobody asks for it; None: for good.
        until: when it is unloaded if nobody asks for it, by ``time.monotonic``; None: it stays, or is asked now.
        tokens: generated so far.
        busy: what holds while it is asked.
    """

    name: str
    model: nn.Module
    sequences: Continuous | Leader
    load_s: float
    keep_s: float | None = None
    until: float | None = None
    tokens: int = 0
    jobs: dict[int, Writer] = field(default_factory=dict)
    busy: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @property
    def session(self) -> Session:
        """What stands behind it."""
        session: Session = self.model.outcore
        return session

    @property
    def leader(self) -> Leader | None:
        """What the ranks that share it follow; None: all of it is here."""
        return None if isinstance(self.sequences, Continuous) else self.sequences

    @property
    def counters(self) -> dict[str, int]:
        """What it has done so far, and the bytes of its plan."""
        m, plan = self.session.metrics, self.session.plan
        return {"sweeps": m.sweeps, "bytes_read": m.bytes_read, "tokens": self.tokens, "drafted": m.drafted,
                "accepted": m.accepted, "memory_bytes": plan.peak_bytes, "budget_bytes": plan.budget_bytes}  # fmt: skip

    def stay(self, keep_s: float | None) -> None:
        """Let it stay for so long after it was asked last; None, or below 0: for good. What ranks share stays so."""
        self.keep_s = None if self.leader is not None or keep_s is None or keep_s < 0 else keep_s
        # While it is asked, the time has not begun.
        self.until = None if self.keep_s is None or self.jobs else time.monotonic() + self.keep_s

    def take(self, uid: int, writer: Writer) -> None:
        """It is asked."""
        if not self.jobs:
            self.until = None
            self.busy.close()
            self.busy.enter_context(generating(self.model))
        self.jobs[uid] = writer

    def rest(self) -> None:
        """Nobody asks it for anything now."""
        self.busy.close()
        if self.leader is not None:
            self.leader.rest()
        if self.until is None and self.keep_s is not None:
            self.until = time.monotonic() + self.keep_s
        clear_cache()


class ModelSlot:
    """Room for one model. Used on the engine's thread; its attributes are read from others, which never wait.

    Args:
        open_model: loads a model by its name.
        keep_alive: seconds that a model stays when nobody asks for it; None: for good.
        options: of ``Continuous``.

    Attributes:
        loaded: the model that is in memory. ``loading``: the name of the one that is being loaded.
    """

    def __init__(self, open_model: Callable[[str], nn.Module], keep_alive: float | None, **options: Any) -> None:
        self.open, self.keep_alive, self._options = open_model, keep_alive, options
        self.loaded: Loaded | None = None
        self.loading: str | None = None

    @property
    def name(self) -> str | None:
        """Of the model that is in memory."""
        return self.loaded.name if self.loaded is not None else None

    @property
    def asked(self) -> bool:
        """The model is writing."""
        return self.loaded is not None and bool(self.loaded.jobs)

    @property
    def left_s(self) -> float | None:
        """Seconds until the model is unloaded; None: it stays."""
        until = self.loaded.until if self.loaded is not None else None
        return None if until is None else max(0.0, until - time.monotonic())

    def switch(self, name: str) -> Loaded:
        """Have this model in memory, and no other."""
        self.drop()
        self.loading, began = name, time.monotonic()
        try:
            model = self.open(name)
        finally:
            self.loading = None
        publish(model, "serve", name)
        session: Session = model.outcore
        own = Continuous(model, **self._options)
        self.loaded = Loaded(name, model, session.transport.leader(own) or own, time.monotonic() - began)
        self.loaded.stay(self.keep_alive)
        return self.loaded

    def drop(self) -> None:
        """Let the model go."""
        if self.loaded is None:
            return
        loaded, self.loaded = self.loaded, None
        for close in (loaded.sequences.close, loaded.busy.close, loaded.session.close):
            try:
                close()
            except Exception:
                log.exception("%s cannot be closed", loaded.name)
        # What refers to itself would stay beside the next model; nor may callers refer to this one.
        del loaded, close
        gc.collect()
        clear_cache()
