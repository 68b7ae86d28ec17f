"""A text that is handed out token by token: by one thread at a time, and never half a step."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any, TypeVar

from ..system.exclusive import Exclusive, only

Item = TypeVar("Item")


def served(exclusive: Exclusive, steps: Generator[Item, None, None]) -> Iterator[Item]:
    """What ``steps`` yields, for which no other thread uses the model, and which no signal interrupts half-way.

    A signal that came meanwhile is handled between steps. What was not handed out is then taken back: ``steps`` has the
    exception thrown in at its last ``yield``.

    Raises:
        BusyError: another thread holds the model, or began this.
    """
    holder = exclusive.hold()
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
                    pass_on(steps, Unread() if made else e)
                raise
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


class Unread(BaseException):
    """Thrown in at a ``yield`` of which nobody got to see the value."""


def pass_on(steps: Generator[Any, None, None], error: BaseException) -> None:
    """Let ``steps`` know, at its last ``yield``, what ended whoever reads it. What it raises itself comes out."""
    try:
        steps.throw(error)
    except BaseException as e:
        if e is not error:
            raise
