"""Reads under way: what whoever wants a unit waits for."""

from __future__ import annotations

import threading

from ..errors import ReadError
from ..machine import interrupts


class Read:
    """Reads under way for one unit. ``wait`` returns when all bytes are in place, or raises what went wrong."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.error: ReadError | None = None
        self.cancelled = False
        self.began = 0.0  # when the first chunk was taken up; 0 before
        self._left = 1  # one is held by the submitter until every chunk is queued
        self._lock = threading.Lock()
        self._done = threading.Event()

    def add(self) -> None:
        with self._lock:
            self._left += 1

    def finish(self, error: ReadError | None = None) -> bool:
        """One chunk less; returns whether it was the last."""
        with self._lock:
            self.error = self.error or error
            self._left -= 1
            last = self._left == 0
        if last:
            self._done.set()
        return last

    @property
    def ready(self) -> bool:
        """Whether every chunk has ended, well or badly."""
        return self._done.is_set()

    @property
    def failed(self) -> bool:
        """Whether it has ended badly."""
        return self.ready and self.error is not None

    def cancel(self) -> None:
        """Skip the chunks that have not begun. ``wait`` still waits for those that have."""
        self.cancelled = True

    def ends_within(self, seconds: float) -> bool:
        """Wait for so long at most; whether it has ended, well or badly."""
        return self._done.wait(seconds)

    def wait_quietly(self) -> None:
        """Wait until no thread writes to the buffer any more; errors are ignored."""
        self._done.wait()

    def ended(self) -> None:
        """The same, but a signal that is held meanwhile is handled, and may raise."""
        interrupts.wait(self._done)

    def wait(self) -> None:
        self._done.wait()
        if self.error is not None:
            raise self.error
