"""Points in long work at which it may be interrupted."""

from __future__ import annotations

import threading
from collections.abc import Callable

# Seconds between two checks of a wait.
POLL_S = 0.05

# Callbacks of ``check``; an exception of one ends the work. ``exclusive`` adds one.
moments: list[Callable[[], None]] = []


def check() -> None:
    """Runs every callback; any of them may raise."""
    for call in moments:
        call()


def wait(event: threading.Event) -> None:
    """Waits for an event, checking for interrupts."""
    while not event.wait(POLL_S):
        check()
