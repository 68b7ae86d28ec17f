"""What a model's final norm puts out, for whoever listens while a pass is built."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .hooks import swap


class HiddenTap:
    """Listens to a model's final norm, which puts out the states that its head is given; nothing of a pass changes.

    Args:
        norm: outside of layers, so that its weights are always in memory.
    """

    def __init__(self, norm: nn.Module) -> None:
        self._heard = threading.local()
        swap(norm, "Tapped", self._call)

    def _call(self, original: Callable[..., mx.array], args: Any, kwargs: Any) -> mx.array:
        states = original(*args, **kwargs)
        heard: list[mx.array] | None = getattr(self._heard, "now", None)
        if heard is not None:
            heard.append(states)
        return states

    @contextmanager
    def listening(self) -> Iterator[list[mx.array]]:
        """What passes that this thread builds inside put out: arrays (1, tokens, hidden), not evaluated."""
        heard: list[mx.array] = []
        self._heard.now = heard
        try:
            yield heard
        finally:
            self._heard.now = None
