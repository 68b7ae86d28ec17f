"""One model serves one thread at a time.

Its slots, its caches' place in a sweep and MLX's streams belong to whoever computes with it. A generation holds the
model from its first token asked for until its end; other threads wait for that, as they would for a lock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

from ..errors import BusyError
from .held_signals import held
from .interrupts import POLL_S, check

PATIENCE_S = 60.0
"""Seconds that others wait for a text which nobody asks another token of."""


class Exclusive:
    """Who may compute with a model.

    Two locks, so that a model can be closed between two steps of a generation: ``hold`` for as long as a generation
    lives, ``with`` for each step. A thread may hold a model several times over: texts that it generates in turn do not
    disturb each other, since each has caches of its own.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, patience_s: float = PATIENCE_S) -> None:
        self._clock, self._patience_s = clock, patience_s
        self._step = threading.RLock()
        self._steps = 0  # under way, one inside of the other
        self._seen = 0.0  # when the last one ended
        self._changed = threading.Condition()
        self._owner: threading.Thread | None = None
        self._held = 0

    @property
    def computing(self) -> bool:
        """Whether a step is under way at this moment."""
        return self._steps > 0

    def hold(self) -> threading.Thread:
        """Wait until no other thread generates, and keep the others out until ``give_back``.

        Returns:
            who holds it: for ``give_back``, since what is left over may be ended by another thread.

        Raises:
            BusyError: another thread began a text and neither goes on with it nor closes it.
        """
        me, taken = threading.current_thread(), False
        try:
            with held, self._changed:
                since = self._clock()
                # A thread that ended cannot go on with what it left behind.
                while (owner := self._owner) is not None and owner is not me and owner.is_alive():
                    idle = self._clock() - max(since, self._seen)
                    if not self._steps and idle > self._patience_s:
                        raise BusyError(
                            f"this model serves one thread at a time, and thread {owner.name!r} has left a text "
                            f"unfinished for {idle:.0f} s: read it to its end, or close its generator"
                        )
                    self._changed.wait(POLL_S)
                    check()
                if self._owner is not me:
                    self._owner, self._held = me, 0
                self._held += 1
                taken = True
                self._seen = self._clock()
        except BaseException:
            # A signal that came meanwhile is handled when it is held already, and nobody would give it back.
            if taken:
                self.give_back(me)
            raise
        return me

    def give_back(self, holder: threading.Thread) -> None:
        """Let the next one have it."""
        with held, self._changed:
            if self._owner is holder:
                self._held -= 1
                if self._held <= 0:
                    self._owner = None
                    self._changed.notify()

    def __enter__(self) -> None:
        """One step: nobody else computes, and signals are held."""
        held.__enter__()
        try:
            while not self._step.acquire(timeout=POLL_S):
                check()
        except BaseException as e:
            held.__exit__(type(e), e, None)
            raise
        self._steps += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._steps -= 1
        self._seen = self._clock()
        self._step.release()
        held.__exit__(kind, error, trace)


def only(holder: threading.Thread) -> None:
    """Refuse to go on with a text in another thread than the one that began it.

    Raises:
        BusyError: this is another.
    """
    if threading.current_thread() is not holder:
        raise BusyError(
            f"this text was begun by thread {holder.name!r}; MLX's streams belong to threads: go on with it there"
        )
