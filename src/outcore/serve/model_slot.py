"""The one model that a server's engine has in memory, and how long it stays."""

from __future__ import annotations

import contextlib
import gc
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.nn as nn

from ..decode.continuous import Continuous
from ..decode.served import generating
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
        tokens: generated so far.
        until: when it is unloaded if nobody asks for it, by ``time.monotonic``; None: it stays.
        busy: what holds while it is asked.
    """

    name: str
    model: nn.Module
    sequences: Continuous | Leader
    load_s: float
    tokens: int = 0
    until: float | None = None
    jobs: dict[int, Writer] = field(default_factory=dict)
    busy: contextlib.ExitStack | None = None

    @property
    def counters(self) -> dict[str, int]:
        """What it has done so far."""
        m = self.session.metrics
        return {"sweeps": m.sweeps, "bytes_read": m.bytes_read, "tokens": self.tokens, "drafted": m.drafted,
                "accepted": m.accepted}  # fmt: skip

    @property
    def leader(self) -> Leader | None:
        """What the ranks that share it follow; None: all of it is here."""
        return None if isinstance(self.sequences, Continuous) else self.sequences

    @property
    def session(self) -> Session:
        """What stands behind it."""
        session: Session = self.model.outcore
        return session

    def wake(self) -> None:
        """It is asked."""
        self.until = None
        if self.busy is None:
            self.busy = contextlib.ExitStack()
            self.busy.enter_context(generating(self.model))

    def rest(self) -> None:
        """Nobody asks it now."""
        if self.busy is not None:
            self.busy.close()
            self.busy = None


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
        self.open, self._keep_alive, self._alive, self._options = open_model, keep_alive, keep_alive, options
        self.loaded: Loaded | None = None
        self.loading: str | None = None
        self._before: dict[str, Counter[str]] = {}  # counters of models that were let go

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

    @property
    def counters(self) -> dict[str, dict[str, int]]:
        """What each model has done that is or was loaded."""
        found, loaded = {name: Counter(before) for name, before in self._before.items()}, self.loaded
        if loaded is not None:
            found.setdefault(loaded.name, Counter()).update(loaded.counters)
        return {name: dict(counters) for name, counters in found.items()}

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
        self.stay(None)
        return self.loaded

    def stay(self, keep_alive: float | None) -> None:
        """Let the model stay for so long after it was asked last; None: as the server says; negative: for good. What
        ranks share stays for good."""
        if self.loaded is None or self.loaded.leader is not None:
            return
        seconds = self._keep_alive if keep_alive is None else keep_alive
        self._alive = None if seconds is None or seconds < 0 else seconds
        # While it is asked, the time has not begun.
        self.loaded.until = None if self._alive is None or self.loaded.jobs else time.monotonic() + self._alive

    def rest(self) -> None:
        """Nobody asks the model for anything now."""
        if self.loaded is None:
            return
        self.loaded.rest()
        if self.loaded.leader is not None:
            self.loaded.leader.rest()
        if self.loaded.until is None and self._alive is not None:
            self.loaded.until = time.monotonic() + self._alive
        clear_cache()

    def drop(self) -> None:
        """Let the model go."""
        if self.loaded is None:
            return
        name = self.loaded.name
        self._before[name] = Counter(self.counters[name])
        loaded, self.loaded = self.loaded, None
        for close in (loaded.sequences.close, loaded.rest, loaded.session.close):
            try:
                close()
            except Exception:
                log.exception("%s cannot be closed", name)
        # What refers to itself would stay beside the next model; nor may callers refer to this one.
        del loaded, close
        gc.collect()
        clear_cache()
