"""Standard streams of a run's first rank: the launcher's own where it runs here, or lines that are sent to it."""

from __future__ import annotations

import fcntl
import os
import queue
import sys
import threading
from typing import Any


class Streams:
    """This process's standard streams, duplicated to be handed on.

    Args:
        as_json: standard output holds the launcher's own JSON, so what the rank prints goes to standard error.

    Attributes:
        descriptors: of input, output and errors.
        terminal: whether somebody types.
    """

    def __init__(self, as_json: bool) -> None:
        self.descriptors = tuple(_duplicate(fd) for fd in (0, 2 if as_json else 1, 2))
        self.terminal = os.isatty(self.descriptors[0])

    def __enter__(self) -> Streams:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self.descriptors:
            os.close(fd)


class Input(threading.Thread):
    """Reads lines of standard input, as events for the rank that wants them."""

    def __init__(self, events: queue.Queue[Any]) -> None:
        super().__init__(name="outcore-launch-input", daemon=True)
        self._events = events

    def run(self) -> None:
        """Until there are no more."""
        for line in sys.stdin:
            self._events.put((-1, {"input": line}))
        self._events.put((-1, {"input_end": 1}))


def _duplicate(fd: int) -> int:
    """Beyond the descriptors that a child's own streams take; one that is closed leads nowhere."""
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10)
    except OSError:
        nowhere = os.open(os.devnull, os.O_RDWR)
        try:
            return fcntl.fcntl(nowhere, fcntl.F_DUPFD_CLOEXEC, 10)
        finally:
            os.close(nowhere)
