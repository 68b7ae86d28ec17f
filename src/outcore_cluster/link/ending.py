"""What ends a process whose run has failed, also where its main thread sits in a call of C that takes no exception."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable

from outcore.errors import LinkError
from outcore.text import printable

STATUS = 1
TELL_S = 0.5


def end_within(grace_s: float, error: LinkError, told: Callable[[], bool], leave: Callable[[int], None]) -> None:
    """Let the main thread end by itself, and end the process after that.

    Args:
        told: whether somebody has had the error as an exception, and will have said so.
        leave: ``os._exit``.
    """

    def run() -> None:
        time.sleep(grace_s)
        if not told():
            # Who reads it may have stopped.
            telling = threading.Thread(target=write_error, args=(f"outcore: {error}",), daemon=True)
            telling.start()
            telling.join(TELL_S)
        leave(STATUS)

    threading.Thread(target=run, name="outcore-link-end", daemon=True).start()


def write_error(line: str) -> None:
    """A line on standard error, past Python's own streams: another thread may hold their locks for ever."""
    with contextlib.suppress(OSError):
        os.write(2, f"{printable(line)}\n".encode(errors="backslashreplace"))
