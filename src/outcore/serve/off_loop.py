"""Work in Python alone that takes long: on a thread, so that the event loop hears others meanwhile."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

R = TypeVar("R")

LARGE = 1 << 16
"""Bytes of a body from which on it is read off the loop: what is shorter is read sooner than a thread is asked."""

_lock = threading.Lock()
_under_way: list[bool] = []  # for each work: whether Python collected garbage before it


async def off_loop(work: Callable[..., R], *args: Any) -> R:
    """What ``work`` returns or raises; its thread is one of the loop's own, which end with the loop."""

    def done() -> R:
        with _no_collection():
            return work(*args)

    return await asyncio.to_thread(done)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Without Python looking, again and again, whether a million new objects are garbage: no thread runs meanwhile."""
    with _lock:
        _under_way.append(gc.isenabled())
        gc.disable()
    try:
        yield
    finally:
        with _lock:
            collected = _under_way[0]
            _under_way.pop()
            if not _under_way and collected:
                gc.enable()
