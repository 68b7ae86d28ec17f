"""Lets one thread at a time generate with a model, and postpones signals until it is safe to handle them.

Slots, caches and MLX's streams belong to the generating thread. It locks the model from a text's first token to its
end; other threads wait.

During a step, signals such as Ctrl-C are only noted: Python runs a signal's handler between any two instructions of the
main thread, so its exception could leave work half done. Noted signals are handled at ``interrupts.check`` or at the
end of the step. Other threads can register a callback that runs at ``interrupts.check`` (``asking``).
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, TypeVar

from ..errors import BusyError
from .interrupts import POLL_S, check, moments

Item = TypeVar("Item")

# Seconds that other threads wait while the generating thread asks for no further token.
PATIENCE_S = 60.0


class Exclusive:
    """A lock for generating with a model.

    It is two locks, so that a model can be closed between two steps of a generation: ``hold`` for a whole generation,
    ``with`` for each step. A thread may call ``hold`` several times, since its texts have separate caches.
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
        """Waits until no other thread generates, then locks other threads out until ``give_back``.

        Returns:
            This thread, to pass to ``give_back``, which any thread may call.

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
            # A signal's handler may raise after the lock was taken; then the caller would not release it.
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
        """Begins a step: until its end no other thread computes, and signals are only noted."""
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


def served(
    exclusive: Exclusive, steps: Generator[Item, None, None], is_last: Callable[[Item], object] = lambda _: False
) -> Iterator[Item]:
    """Yields from ``steps`` with exclusive use of the model; no signal interrupts a step.

    Signals are handled between steps. If a handler raises, the item that was not yet yielded is rolled back:
    ``NotHandedOut`` is thrown into ``steps`` at its last ``yield``.

    Args:
        is_last: true of the last item. Then ``steps`` runs to its end before the item is yielded, so that other
            threads can use the model; an error at its end is raised after that item, also on ``close``.

    Raises:
        BusyError: another thread generates, or began this text.
    """
    holder = exclusive.hold()
    late: list[BaseException] = []
    try:
        while True:
            if threading.current_thread() is not holder:
                whose = f"this text was begun by thread {holder.name!r}"
                raise BusyError(f"{whose}; MLX's streams belong to threads: go on with it there")
            made = False
            try:
                with exclusive:
                    item = next(steps)
                    made = True
            except StopIteration:
                return
            except BaseException as e:
                # If the step did not complete, the last item was yielded and is not rolled back.
                with exclusive:
                    pass_on(steps, NotHandedOut() if made else e)
                if isinstance(e, KeyboardInterrupt):
                    # Where the engine was tells nothing to whoever pressed Ctrl-C, as in a notebook.
                    raise e.with_traceback(None) from None
                raise
            if is_last(item):
                try:
                    with exclusive:
                        next(steps, None)
                except BaseException as e:
                    late.append(e)
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
        if late:
            raise late.pop() from None
        raise
    if late:
        raise late.pop()


class NotHandedOut(BaseException):
    """Thrown into a generator at a ``yield`` whose value was never passed on."""


def pass_on(steps: Generator[Any, None, Any], error: BaseException) -> None:
    """Throws an error into ``steps`` at its last ``yield``. Raises only other errors, which this may cause."""
    try:
        steps.throw(error)
    except BaseException as e:
        if e is not error:
            raise
    finally:
        del error  # it has passed this frame: holding it would be a cycle, which keeps all callers' arrays


# Signals whose handlers may raise: interrupts, timeouts, requests to end.
SIGNALS = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGALRM", "SIGVTALRM", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)
)

# The functions without their conversion to enumerations, which takes ten times as long. They run at each token.
_handler_of: Any = getattr(signal.getsignal, "__wrapped__", signal.getsignal)
_set_handler: Any = getattr(signal.signal, "__wrapped__", signal.signal)


class _Asked(threading.local):
    call: Callable[[], None] | None = None


_asked = _Asked()


class _Held:
    """Postpones signals; reentrant. Does nothing outside the main thread, the only one that handles signals."""

    def __init__(self) -> None:
        self._depth = 0
        self._came: deque[int] = deque()
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        if self._depth == 0:
            # SIGINT first, since it is the likeliest to arrive while handlers are replaced.
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
        if threading.current_thread() is not threading.main_thread():
            return
        self._depth -= 1
        if self._depth == 0:
            came = list(self._came)
            self._came.clear()
            self._give_back()
            for number in came:
                # Send it again, now for the program's own handler.
                signal.raise_signal(number)

    def _give_back(self) -> None:
        for number in reversed(list(self._handlers)):
            _set_handler(number, self._handlers.pop(number))

    def _note(self, number: int, _: FrameType | None) -> None:
        if number not in self._came:
            self._came.append(number)

    def check(self) -> None:
        """Handles postponed signals, then calls this thread's ``asking`` callback. Raises what either raises."""
        while self._came and threading.current_thread() is threading.main_thread():
            number = self._came.popleft()
            # A handler may install another handler for its signal.
            _set_handler(number, self._handlers[number])
            try:
                self._handlers[number](number, None)
            finally:
                self._handlers[number] = _handler_of(number)
                _set_handler(number, self._note)
        if _asked.call is not None:
            _asked.call()


# ``with held:`` postpones signals until the end of the block, or until ``interrupts.check``.
held = _Held()

moments.append(held.check)


@contextmanager
def asking(call: Callable[[], None]) -> Iterator[None]:
    """Makes ``interrupts.check`` call ``call`` in this thread during the block; an exception of it ends the work."""
    before, _asked.call = _asked.call, call
    try:
        yield
    finally:
        _asked.call = before


# Where Linux lists a process's threads, and the most seconds to wait until an ended thread is not listed.
TASKS, MOST_S = Path("/proc/self/task"), 10.0


def join(thread: threading.Thread, timeout_s: float | None = None, tasks: Path = TASKS) -> None:
    """Waits until a thread has ended, in the operating system too.

    Before Python 3.13, ``Thread.join`` waits only for the thread's Python code. After that the thread destroys MLX's
    compiled functions, for which it needs the GIL. If Python has shut down by then, the process aborts ("terminate
    called without an active exception").
    """
    thread.join(timeout_s)
    if thread.is_alive() or sys.version_info >= (3, 13):
        return
    if not tasks.is_dir():
        time.sleep(0.1)  # macOS does not list threads; this is many times what is needed
        return
    task, end = tasks / str(thread.native_id), time.monotonic() + MOST_S
    while task.exists() and time.monotonic() < end:
        time.sleep(0.002)
