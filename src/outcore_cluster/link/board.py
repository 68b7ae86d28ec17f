"""What the threads of a link have in common: the run's fault, once there is one, and who waits."""

from __future__ import annotations

import threading
from collections.abc import Callable

from outcore.errors import LinkError
from outcore.machine import interrupts

from .movement import Movement

POLL_S = 0.05
"""Seconds until a wait of the main thread looks for signals that are held."""


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
