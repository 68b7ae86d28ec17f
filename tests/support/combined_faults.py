"""What goes wrong while a text is made: a read that fails, an exception of the caller's, Ctrl-C, memory that runs
short, and a caller who leaves."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import mlx.core as mx

from outcore.engine import governor
from outcore.engine.governor import Governor
from outcore.machine.memory import MemoryLimit, Pressure


class Disturbed(Exception):
    """Raised in the middle of something."""


@dataclass
class Fault:
    """One of ``combined_cases``' disturbances.

    Attributes:
        at: which of the events of its kind it is that goes wrong.
        happened: whether it has.
    """

    kind: str
    at: int = 3
    happened: bool = False
    _left: int = field(init=False)

    def __post_init__(self) -> None:
        self._left = self.at

    def leaves(self, tokens: int) -> bool:
        """Whether the caller leaves behind so many tokens."""
        self.happened |= self.kind == "cancel" and tokens >= self.at
        return self.kind == "cancel" and self.happened

    def through(self, drawing: dict[str, Any]) -> dict[str, Any]:
        """Arguments of a text, of which one raises."""
        if self.kind != "callback":
            return drawing
        if "sampler" in drawing:
            return drawing | {"sampler": self._raising(drawing["sampler"])}
        if "logits_processors" in drawing:
            first, *others = drawing["logits_processors"]
            return drawing | {"logits_processors": [self._raising(first), *others]}
        return drawing | {"sampler": self._raising(lambda logprobs: mx.argmax(logprobs, axis=-1))}

    def _raising(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self._count()
            return function(*args)

        return call

    def _count(self) -> None:
        self._left -= 1
        if self._left == 0:
            self.happened = True
            raise Disturbed

    @contextlib.contextmanager
    def within(self, expected_s: float = 0.05) -> Iterator[None]:
        """It may happen inside."""
        if self.kind == "read":
            lock, real = threading.Lock(), os.preadv

            def preadv(*args: Any) -> int:
                with lock:
                    self._left -= 1
                    self.happened |= self._left <= 0
                if self._left <= 0:
                    raise OSError(5, "Input/output error")
                return real(*args)

            with patch.object(os, "preadv", preadv):
                yield
        elif self.kind == "interrupt":

            def ring(*_: Any) -> None:
                self.happened = True
                raise KeyboardInterrupt

            before = signal.signal(signal.SIGALRM, ring)
            signal.setitimer(signal.ITIMER_REAL, expected_s)
            try:
                yield
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, before)
        elif self.kind == "pressure":

            def short(*_: Any, **__: Any) -> Pressure:
                self.happened = True
                return Pressure((MemoryLimit(2_000_000_000, 18_000_000, "test"),))

            always = patch.object(Governor, "due", lambda *_: True)
            with patch.object(governor, "read_pressure", short), always:
                yield
        else:
            yield
