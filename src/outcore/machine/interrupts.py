"""Points in long work at which it may be interrupted."""

from __future__ import annotations

from collections.abc import Callable

# Seconds between two checks of a wait.
POLL_S = 0.05

# Callbacks of ``check``; an exception of one ends the work. ``exclusive`` adds one.
moments: list[Callable[[], None]] = []


def check() -> None:
    """Runs every callback; any of them may raise."""
    for call in moments:
        call()
