"""Ctrl-C and its kin, kept for a moment at which they can do no harm.

Python runs a signal's handler between any two instructions of the main thread, so an exception from it could fall
between the two halves of anything. While signals are held they are noted, and handled where the code asks for them
(``interrupts.check``), or at the end. A thread that no signal reaches can have something of its own asked at the same
moments.
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

SIGNALS = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGALRM", "SIGVTALRM", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)
)
"""Those whose handlers may raise: an interrupt, a time-out, a request to end."""

# Without what makes numbers into enumerations, which takes ten times as long: this is done before and after each token.
_handler_of: Any = getattr(signal.getsignal, "__wrapped__", signal.getsignal)
_set_handler: Any = getattr(signal.signal, "__wrapped__", signal.signal)


class _Asked(threading.local):
    call: Callable[[], None] | None = None


_asked = _Asked()


class _Held:
    """Reentrant; nothing happens outside of the main thread, which alone handles signals."""

    def __init__(self) -> None:
        self._depth = 0
        self._came: deque[int] = deque()
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> None:
        if not _in_main_thread():
            return
        if self._depth == 0:
            # SIGINT first: once it is noted, nothing that is likely can come between the rest.
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
                # Raised anew, for whatever handler there is now.
                signal.raise_signal(number)

    def _give_back(self) -> None:
        for number in reversed(list(self._handlers)):
            _set_handler(number, self._handlers.pop(number))

    def _note(self, number: int, _: FrameType | None) -> None:
        if number not in self._came:
            self._came.append(number)

    def check(self) -> None:
        """Handle the signals that came, where they are held; elsewhere Python has handled them. Call what is
        ``asking``. An exception of either is raised from here."""
        while self._came and _in_main_thread():
            number = self._came.popleft()
            # A handler may set another in its own place.
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


held = _Held()
"""``with held:`` keeps signals until its end, or until ``interrupts.check``."""

moments.append(held.check)


@contextmanager
def asking(call: Callable[[], None]) -> Iterator[None]:
    """On this thread ``interrupts.check`` calls this too: what it raises breaks off what is under way."""
    before, _asked.call = _asked.call, call
    try:
        yield
    finally:
        _asked.call = before


TASKS, MOST_S = Path("/proc/self/task"), 10.0
"""Where Linux lists a process's threads, and seconds that one that has ended is waited for."""


def join(thread: threading.Thread, timeout_s: float | None = None, tasks: Path = TASKS) -> None:
    """Wait until a thread has ended, for the system too.

    Before Python 3.13, ``join`` waits for the thread's Python code. What C++ keeps for a thread is destroyed after it:
    MLX's compiled functions, for which it takes Python's lock. Where Python is at its own end by then, the process
    aborts ("terminate called without an active exception").
    """
    thread.join(timeout_s)
    if thread.is_alive() or sys.version_info >= (3, 13):
        return
    if not tasks.is_dir():
        time.sleep(0.1)  # macOS lists no threads of a process; this is many times what it takes
        return
    task, end = tasks / str(thread.native_id), time.monotonic() + MOST_S
    while task.exists() and time.monotonic() < end:
        time.sleep(0.002)
