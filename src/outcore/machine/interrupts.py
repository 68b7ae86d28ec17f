"""Points in long work at which it may be interrupted."""

from __future__ import annotations

import threading
from collections.abc import Callable

POLL_S = 0.05
"""Seconds between two checks of a wait."""

moments: list[Callable[[], None]] = []
"""Called at each check; an exception breaks off the work. ``held_signals`` adds to it."""


def check() -> None:
    """Runs every callback; any of them may raise."""
    for call in moments:
        call()


def wait(event: threading.Event) -> None:
    """Waits for an event, checking for interrupts."""
    while not event.wait(POLL_S):
        check()
