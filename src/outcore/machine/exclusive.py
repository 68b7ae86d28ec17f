"""One model serves one thread at a time.

Its slots, its caches' place in a sweep and MLX's streams belong to whoever computes with it. A generation holds the
model from its first token asked for until its end; other threads wait for that, as they would for a lock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator
from types import TracebackType
from typing import Any, TypeVar

from ..errors import BusyError
from .held_signals import held
from .interrupts import POLL_S, check

Item = TypeVar("Item")

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


def served(
    exclusive: Exclusive, steps: Generator[Item, None, None], is_last: Callable[[Item], bool] = lambda _: False
) -> Iterator[Item]:
    """What ``steps`` yields, for which no other thread uses the model, and which no signal interrupts half-way.

    A signal that came meanwhile is handled between steps. What was not handed out is then taken back: ``steps`` has the
    exception thrown in at its last ``yield``.

    Args:
        is_last: whether ``steps`` yields nothing more behind this. Then it runs to its end before that is handed out,
            and other threads may have the model, whether anybody asks for more or not; an error of what it does there
            is raised behind the last item, also where this is closed there.

    Raises:
        BusyError: another thread holds the model, or began this.
    """
    holder = exclusive.hold()
    late: BaseException | None = None
    try:
        while True:
            only(holder)
            made = False
            try:
                with exclusive:
                    item = next(steps)
                    made = True
            except StopIteration:
                return
            except BaseException as e:
                # What came before the step was made concerns what was handed out last, of which nothing is taken back.
                with exclusive:
                    pass_on(steps, NotHandedOut() if made else e)
                raise
            if is_last(item):
                try:
                    with exclusive:
                        next(steps, None)
                except BaseException as e:
                    late = e
                break
            try:
                yield item
            except GeneratorExit:
                raise
            except BaseException as e:
                with exclusive:
                    pass_on(steps, e)
                raise
    finally:
        try:
            with exclusive:
                steps.close()
        finally:
            exclusive.give_back(holder)
    try:
        yield item
    except GeneratorExit:
        if late is not None:
            raise late from None
        raise
    if late is not None:
        raise late


class NotHandedOut(BaseException):
    """Thrown in at a ``yield`` of which nobody got to see the value."""


def pass_on(steps: Generator[Any, None, Any], error: BaseException) -> None:
    """Let ``steps`` know, at its last ``yield``, what ended whoever reads it. What it raises itself comes out."""
    try:
        steps.throw(error)
    except BaseException as e:
        if e is not error:
            raise
