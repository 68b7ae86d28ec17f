"""What the threads of a link have in common: the run's fault, once there is one, and who waits. A process whose run has
failed is ended, also where its main thread sits in a call of C that takes no exception."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable

from outcore.errors import LinkError
from outcore.machine import interrupts
from outcore.text import printable

from .movement import Movement

POLL_S = 0.05
"""Seconds until a wait of the main thread looks for signals that are held."""


STATUS = 1
TELL_S = 0.5


class LinkBoard:
    """One for each link. ``changed`` is notified of everything that anybody may wait for.

    Attributes:
        fault: why the run has failed; None: it has not.
        raised: whether somebody was told of it by an exception.
        closing: whether this rank is about to end.
    """

    def __init__(self, movement: Movement) -> None:
        self.changed = threading.Condition()
        self.movement = movement
        self.fault: LinkError | None = None
        self.raised = False
        self.closing = False

    def fail(self, error: LinkError) -> None:
        """The run has failed, for this reason; the first one counts."""
        with self.changed:
            self.fault = self.fault or error
            self.changed.notify_all()

    def check(self) -> None:
        """Raise the fault, if there is one.

        Raises:
            LinkError: the run has failed.
        """
        if self.fault is not None:
            self.raised = True
            # A new one each time: a traceback grows with each raise.
            raise LinkError(str(self.fault), self.fault.rank)

    def notify(self) -> None:
        """Something has come or gone."""
        with self.changed:
            self.changed.notify_all()

    def wait_for(self, done: Callable[[], bool], rank: int, due: bool) -> None:
        """Wait for what a rank has to bring, and tell it in heartbeats meanwhile. Signals are handled also where they
        are held.

        Raises:
            LinkError: the run has failed.
        """
        if done():
            return
        with self.movement.waiting(rank, due):
            while True:
                with self.changed:
                    if done():
                        break
                    if self.fault is None:
                        self.changed.wait(POLL_S)
                        if done():
                            break
                    failed = self.fault is not None
                if failed:
                    self.check()
                interrupts.check()
        self.movement.note()


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
