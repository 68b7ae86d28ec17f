"""Work in Python alone that takes long: on a thread, so that the event loop hears others meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P, R = ParamSpec("P"), TypeVar("R")

LARGE = 1 << 16
"""Bytes of a body from which on it is read off the loop: what is shorter is read sooner than a thread is asked."""


async def off_loop(work: Callable[P, R], *args: P.args, **options: P.kwargs) -> R:
    """What ``work`` returns or raises; its thread is one of the loop's own, which end with the loop."""
    return await asyncio.to_thread(work, *args, **options)
