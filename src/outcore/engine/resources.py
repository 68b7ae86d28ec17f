"""What a running model holds that is given back: threads, files, and its share of MLX's limits."""

from __future__ import annotations

import weakref
from typing import Any

import mlx.nn as nn

from ..machine.allocator import Needs, limits
from .binding import Closable, close_all


class Resources:
    """What is given back when a model is closed, or dropped unclosed; ``io``: how its files are read."""

    def __init__(self, model: nn.Module) -> None:
        self.closed, self.io = False, "none"
        # Nothing here refers to the model, as the engine and its tables do: it would never be collected.
        self._model = weakref.ref(model)
        self._threads: weakref.finalize[Any, Any] | None = None
        self._limits: weakref.finalize[Any, Any] | None = None

    def limits(self, needs: Needs) -> None:
        """What is needed of MLX's allocator from now on."""
        if not self.closed and (model := self._model()) is not None:
            self._limits = limits.hold(model, needs)

    def files(self, *opened: Closable) -> None:
        """Threads and files that are open now, in place of those before."""
        if self._threads is not None:
            self._threads.detach()
        if (model := self._model()) is not None:
            self._threads = weakref.finalize(model, close_all, *opened)

    def close(self) -> None:
        """Give MLX's limits back."""
        self.closed = True
        if self._limits is not None:
            self._limits()
