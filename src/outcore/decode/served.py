"""A text that is handed out token by token: by one thread at a time, and never half a step."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import mlx.nn as nn
from mlx_lm.generate import generation_stream, wired_limit

from ..machine.allocator import limits
from ..machine.exclusive import Exclusive, only

Item = TypeVar("Item")


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


@contextmanager
def generating(model: nn.Module) -> Iterator[None]:
    """Mlx-lm's ``wired_limit`` around a generation: it wires all, and puts back what was there, which may be older than
    a model."""
    try:
        with wired_limit(model, [generation_stream]):
            yield
    finally:
        limits.renew()
