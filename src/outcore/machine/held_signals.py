"""Postpones signals such as Ctrl-C until it is safe to handle them.

Python runs a signal's handler between any two instructions of the main thread, so its exception could leave work half
done. Held signals are handled at ``interrupts.check`` or at the end of the block. Other threads can have a callback run
at the same points.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from .interrupts import moments

# Signals whose handlers may raise: interrupts, timeouts, requests to end.
SIGNALS = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGALRM", "SIGVTALRM", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)
)

# Skips the conversion to enumerations, which takes ten times as long; this runs before and after each token.
_handler_of: Any = getattr(signal.getsignal, "__wrapped__", signal.getsignal)
_set_handler: Any = getattr(signal.signal, "__wrapped__", signal.signal)


class _Asked(threading.local):
    call: Callable[[], None] | None = None


_asked = _Asked()


class _Held:
    """Holds signals; reentrant. Does nothing outside the main thread, which alone handles signals."""

    def __init__(self) -> None:
        self._depth = 0
        self._came: deque[int] = deque()
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> None:
        if not _in_main_thread():
            return
        if self._depth == 0:
            # SIGINT first, since it is the likeliest to arrive while the other handlers are set.
            try:
                for number in SIGNALS:
                    handler = _handler_of(number)
                    if callable(handler):
                        self._handlers[number] = handler
                        _set_handler(number, self._note)
            except BaseException:
                self._give_back()
                raise
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        if not _in_main_thread():
            return
        self._depth -= 1
        if self._depth == 0:
            came = list(self._came)
            self._came.clear()
            self._give_back()
            for number in came:
                # Raised again, for the current handler.
                signal.raise_signal(number)

    def _give_back(self) -> None:
        for number in reversed(list(self._handlers)):
            _set_handler(number, self._handlers.pop(number))

    def _note(self, number: int, _: FrameType | None) -> None:
        if number not in self._came:
            self._came.append(number)

    def check(self) -> None:
        """Handles held signals, then calls this thread's ``asking`` callback; exceptions of either are raised here."""
        while self._came and _in_main_thread():
            number = self._came.popleft()
            # A handler may install another one.
            _set_handler(number, self._handlers[number])
            try:
                self._handlers[number](number, None)
            finally:
                self._handlers[number] = _handler_of(number)
                _set_handler(number, self._note)
        if _asked.call is not None:
            _asked.call()


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


# ``with held:`` holds signals until the end of the block, or until ``interrupts.check``.
held = _Held()

moments.append(held.check)


@contextmanager
def asking(call: Callable[[], None]) -> Iterator[None]:
    """Makes ``interrupts.check`` on this thread call ``call`` too; its exception breaks off the work."""
    before, _asked.call = _asked.call, call
    try:
        yield
    finally:
        _asked.call = before


# Where Linux lists a process's threads, and the most seconds to wait for an ended thread.
TASKS, MOST_S = Path("/proc/self/task"), 10.0


def join(thread: threading.Thread, timeout_s: float | None = None, tasks: Path = TASKS) -> None:
    """Waits until a thread has ended, in the operating system too.

    Before Python 3.13, ``join`` waits only for the thread's Python code. MLX's compiled functions are destroyed after
    it and need the GIL. If Python has shut down by then, the process aborts ("terminate called without an active
    exception").
    """
    thread.join(timeout_s)
    if thread.is_alive() or sys.version_info >= (3, 13):
        return
    if not tasks.is_dir():
        time.sleep(0.1)  # macOS does not list threads; this is many times what is needed
        return
    task, end = tasks / str(thread.native_id), time.monotonic() + MOST_S
    while task.exists() and time.monotonic() < end:
        time.sleep(0.002)
