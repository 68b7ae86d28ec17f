"""What MLX's allocator wires: a setting of the whole process, for as long as sessions need it.

Wired memory is what Metal keeps resident: neither compressed nor paged in again at each use (MLX's
metal/resident.cpp; macOS 15). mlx-lm wires all that the device recommends while it generates, and nothing else ever.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream, wired_limit

_lock = threading.RLock()  # a session may be collected while it is held
_wired: dict[int, int] = {}
"""Bytes that sessions wire, by a number of each."""

_before = [0]
"""The limit before the first of them."""


def wire(owner: Any, nbytes: int) -> weakref.finalize[Any, Any] | None:
    """Wire memory for as long as ``owner`` lives, or until what is returned is called; None where nothing is wired.

    Args:
        nbytes: of weights, slots and all else that the session has planned. Of all sessions together no more than the
            device recommends is wired: MLX refuses more (metal/allocator.cpp).
    """
    if not mx.metal.is_available():
        return None
    release = weakref.finalize(owner, _release, id(owner))
    release.atexit = False
    with _lock:
        if not _wired:
            _before[:] = [_limit(nbytes)]
        _wired[id(owner)] = nbytes
    renew()
    return release


def renew() -> None:
    """Set the limit to what sessions wire, whatever it was set to meanwhile. Does nothing where nobody does."""
    with _lock:
        if _wired:
            _limit(sum(_wired.values()))


def _release(number: int) -> None:
    with _lock:
        if _wired.pop(number, None) is not None:
            _limit(sum(_wired.values()) if _wired else _before[0])


def _limit(nbytes: int) -> int:
    """Set it; what it was."""
    # Before macOS 15, and without Metal 3, MLX takes the number and wires nothing.
    with suppress(ValueError, RuntimeError):
        return int(mx.set_wired_limit(min(nbytes, int(mx.device_info()["max_recommended_working_set_size"]))))
    return 0


@contextmanager
def generating(model: nn.Module) -> Iterator[None]:
    """Mlx-lm's ``wired_limit`` around a generation. What it restores at the end may be older than a session."""
    try:
        with wired_limit(model, [generation_stream]):
            yield
    finally:
        renew()
