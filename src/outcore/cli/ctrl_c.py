"""Ctrl-C that is asked for, and breaks nothing off by itself."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def never() -> bool:
    """Ctrl-C in the middle of a sweep, which several machines do not break off: they look after it."""
    return False


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed since, as a function. The first time nothing else happens; the second time it raises
    KeyboardInterrupt as usual. Where Ctrl-C is ignored, as in the background, it stays so."""
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    if ignored or threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    came: list[int] = []

    def note(number: int, _: object) -> None:
        came.append(number)
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(came)
    finally:
        signal.signal(signal.SIGINT, before)
