"""Wired memory while mlx-lm generates: it wires all, and puts back what was there, which may be older than a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import mlx.nn as nn
from mlx_lm.generate import generation_stream, wired_limit

from ..machine.allocator import limits


@contextmanager
def generating(model: nn.Module) -> Iterator[None]:
    """Mlx-lm's ``wired_limit`` around a generation."""
    try:
        with wired_limit(model, [generation_stream]):
            yield
    finally:
        limits.renew()
