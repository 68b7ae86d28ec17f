"""Several prompts of one request, answered side by side as if they were one with more choices."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import fields, replace
from typing import cast

from .events import Begun, Event, Finished, GenerationRequest, Service

__all__ = ["answers"]

AT_ONCE = 16
"""Prompts of one request that wait or are answered at the same time: others have to come in between."""

_Item = Event | BaseException | None


async def answers(service: Service, asks: Sequence[GenerationRequest]) -> AsyncGenerator[Event, None]:
    """The events of all of them as those of one: one ``Begun``, the choices numbered through, one ``Finished``.

    ``Begun`` is the first one's that begins. Closing it ends all of them, and so does an error of one.

    Raises:
        RequestError: of the first that fails.
    """
    if len(asks) == 1:
        async with aclosing(cast(AsyncGenerator[Event, None], service.answer(asks[0]))) as one:
            async for event in one:
                yield event
        return
    queue: asyncio.Queue[_Item] = asyncio.Queue(AT_ONCE)
    waiting = iter(_numbered(asks))
    tasks = [asyncio.create_task(_work(service, waiting, queue)) for _ in range(min(AT_ONCE, len(asks)))]
    try:
        async with aclosing(_joined(queue, len(tasks))) as joined:
            async for event in joined:
                yield event
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _numbered(asks: Sequence[GenerationRequest]) -> Iterator[tuple[GenerationRequest, int]]:
    first = 0
    for ask in asks:
        yield ask, first
        first += ask.choices


async def _work(
    service: Service, waiting: Iterator[tuple[GenerationRequest, int]], queue: asyncio.Queue[_Item]
) -> None:
    """Answers one after the other of those that nobody has taken; None, or what was raised, at the end."""
    end: BaseException | None = None
    try:
        for ask, first in waiting:
            async with aclosing(cast(AsyncGenerator[Event, None], service.answer(ask))) as events:
                async for event in events:
                    await queue.put(_moved(event, first))
    except Exception as error:
        end = error
    await queue.put(end)


def _moved(event: Event, first: int) -> Event:
    return event if isinstance(event, Begun | Finished) else replace(event, index=event.index + first)


async def _joined(queue: asyncio.Queue[_Item], workers: int) -> AsyncGenerator[Event, None]:
    begun, finished = False, Finished(0, 0, choices=0)
    while workers:
        item = await queue.get()
        if isinstance(item, BaseException):
            raise item
        if item is None:
            workers -= 1
        elif isinstance(item, Finished):
            finished = _sum(finished, item)
        elif not isinstance(item, Begun):
            yield item
        elif not begun:
            begun = True
            yield item
    yield finished


def _sum(a: Finished, b: Finished) -> Finished:
    """Counts add up; of times that pass side by side, the longest."""
    values = {f.name: (getattr(a, f.name), getattr(b, f.name)) for f in fields(Finished)}
    return Finished(**{name: max(pair) if name.endswith("_s") else sum(pair) for name, pair in values.items()})
