"""Standard streams of a run's first rank: the launcher's own where it runs here, or lines that are sent to it; and its
JSON, where the launcher is asked for that."""

from __future__ import annotations

import fcntl
import json
import os
import queue
import sys
import threading
from typing import Any

ANSWER_S = 1.0
"""Seconds that a rank's last words may come after its end; what it has started may hold its output open."""


class LauncherDocument:
    """What the first rank prints with ``--json``: one document, which is put into the launcher's own."""

    def __init__(self) -> None:
        self._text = ""

    def take(self, text: str) -> None:
        """More of it."""
        self._text += text

    def document(self) -> dict[str, Any]:
        """What is known of it once the rank has ended; nothing where it was ended before it told."""
        for line in reversed(self._text.splitlines()):
            try:
                found = json.loads(line)
            except ValueError:
                continue
            if isinstance(found, dict):
                return found
        return {}


class Streams:
    """This process's standard streams, duplicated to be handed on.

    Args:
        as_json: standard output holds the launcher's own JSON, so what the rank prints goes to standard error.
        answer: or to this.

    Attributes:
        descriptors: of input, output and errors.
        terminal: whether somebody types.
    """

    def __init__(self, as_json: bool, answer: LauncherDocument | None = None) -> None:
        self._reader: threading.Thread | None = None
        output = self._to(answer) if answer is not None else _duplicate(2 if as_json else 1)
        self.descriptors = (_duplicate(0), output, _duplicate(2))
        self.terminal = os.isatty(self.descriptors[0])

    def _to(self, answer: LauncherDocument) -> int:
        read, write = os.pipe()
        self._reader = threading.Thread(target=_read, args=(read, answer), name="outcore-launch-answer", daemon=True)
        self._reader.start()
        output = _duplicate(write)
        os.close(write)
        return output

    def __enter__(self) -> Streams:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self.descriptors:
            os.close(fd)
        if self._reader is not None:
            self._reader.join(ANSWER_S)


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


def _read(fd: int, answer: LauncherDocument) -> None:
    with os.fdopen(fd, encoding="utf-8", errors="backslashreplace") as stream:
        for line in stream:
            answer.take(line)


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
