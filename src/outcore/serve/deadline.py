"""A moment by which the process has ended, whatever is under way then."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

__all__ = ["Deadline"]


class Deadline:
    """Calls ``cut`` on a thread of its own when the moment has come, unless the ``with`` block has ended before.

    Args:
        cut: ends the process.
    """

    def __init__(self, cut: Callable[[], None]) -> None:
        self._cut, self._at = cut, float("inf")
        self._ended = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def by(self, at: float) -> None:
        """The process is to have ended by then, a time of ``time.monotonic``; the earliest that was given counts."""
        with self._changed:
            self._at = min(self._at, at)
            self._changed.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="outcore-deadline", daemon=True)
                self._thread.start()

    def __enter__(self) -> Deadline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify()

    def _run(self) -> None:
        with self._changed:
            while not self._ended and (left := self._at - time.monotonic()) > 0:
                self._changed.wait(left)
            if self._ended:
                return
        self._cut()
