"""Lets one thread at a time generate with a model.

Slots, caches and MLX's streams belong to the generating thread. A generation holds the model from its first token to
its end; other threads wait, as for a lock.
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

# Seconds that other threads wait for a generation whose next token nothing requests.
PATIENCE_S = 60.0


class Exclusive:
    """A lock for generating with a model.

    It is two locks, so that a model can be closed between two steps of a generation: ``hold`` for a whole generation,
    ``with`` for each step. One thread may hold it several times, since its texts have separate caches.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, patience_s: float = PATIENCE_S) -> None:
        self._clock, self._patience_s = clock, patience_s
        self._step = threading.RLock()
        self._steps = 0  # running steps, nested
        self._seen = 0.0  # when the last one ended
        self._changed = threading.Condition()
        self._owner: threading.Thread | None = None
        self._held = 0

    @property
    def computing(self) -> bool:
        """Whether a step is running."""
        return self._steps > 0

    def hold(self) -> threading.Thread:
        """Waits until no other thread generates, and keeps others out until ``give_back``.

        Returns:
            The holder, to pass to ``give_back``, which another thread may call.

        Raises:
            BusyError: another thread neither continues its text nor closes it.
        """
        me, taken = threading.current_thread(), False
        try:
            with held, self._changed:
                since = self._clock()
                # A thread that has ended cannot continue its text.
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
            # Handling a signal may raise after the lock was taken; the caller would not release it.
            if taken:
                self.give_back(me)
            raise
        return me

    def give_back(self, holder: threading.Thread) -> None:
        with held, self._changed:
            if self._owner is holder:
                self._held -= 1
                if self._held <= 0:
                    self._owner = None
                    self._changed.notify()

    def __enter__(self) -> None:
        """Begins a step: no other thread computes, and signals are held."""
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
    """Refuses to continue a text in another thread than the one that began it.

    Raises:
        BusyError: this is another thread.
    """
    if threading.current_thread() is not holder:
        raise BusyError(
            f"this text was begun by thread {holder.name!r}; MLX's streams belong to threads: go on with it there"
        )


def served(
    exclusive: Exclusive, steps: Generator[Item, None, None], is_last: Callable[[Item], bool] = lambda _: False
) -> Iterator[Item]:
    """Yields from ``steps`` with exclusive use of the model; no signal interrupts a step.

    Signals are handled between steps. If one raises, the item not yet yielded is rolled back: the exception is thrown
    into ``steps`` at its last ``yield``.

    Args:
        is_last: whether an item is the last one. ``steps`` then runs to its end before the item is yielded, which frees
            the model for other threads; an error at its end is raised after that item, also on ``close``.

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
                # An error before the step completed concerns the item yielded last, which is not rolled back.
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
    """Thrown into a generator at a ``yield`` whose value was never passed on."""


def pass_on(steps: Generator[Any, None, Any], error: BaseException) -> None:
    """Throws an error into ``steps`` at its last ``yield``; only other errors come out."""
    try:
        steps.throw(error)
    except BaseException as e:
        if e is not error:
            raise
