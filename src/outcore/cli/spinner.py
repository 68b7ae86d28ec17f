"""A sign of life while MLX is imported, which takes a second or, for the first time, many. Without rich, which is
imported meanwhile."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
AFTER, EVERY = 0.2, 0.1
"""Seconds until it is shown, and between its frames."""

CLEAR = "\r\x1b[2K"


@contextmanager
def spinner(what: str) -> Iterator[None]:
    """Turns on standard error until the block ends; not where that is no terminal that can take it back."""
    stream = sys.stderr
    if not stream.isatty() or os.environ.get("TERM", "dumb") == "dumb":
        yield
        return
    done = threading.Event()

    def turn() -> None:
        # Ctrl-C is the main thread's, also while that blocks it.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        n = 0
        with suppress(OSError, ValueError, UnicodeEncodeError):
            while not done.wait(EVERY if n else AFTER):
                stream.write(f"{CLEAR}{FRAMES[n % len(FRAMES)]} {what}")
                stream.flush()
                n += 1
            if n:
                stream.write(CLEAR)
                stream.flush()

    thread = threading.Thread(target=turn, name="outcore-spinner", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
