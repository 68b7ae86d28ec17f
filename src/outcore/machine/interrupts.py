"""Moments in the middle of something long at which it may be broken off."""

from __future__ import annotations

import threading
from collections.abc import Callable

POLL_S = 0.05
"""Seconds until a wait asks again."""

moments: list[Callable[[], None]] = []
"""What is called at each: what it raises breaks off what is under way. Joined by ``held_signals``."""


def check() -> None:
    """Break off here, if anybody wants that."""
    for call in moments:
        call()


def wait(event: threading.Event) -> None:
    """Wait for an event, unless what is under way is broken off meanwhile."""
    while not event.wait(POLL_S):
        check()
