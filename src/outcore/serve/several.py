"""Several prompts of one request, answered side by side as if they were one with more choices."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import fields, replace
from typing import cast

from .events import Begun, Event, Finished, GenerationRequest, Service

AT_ONCE = 16
"""Prompts of one request that wait or are answered at the same time: others have to come in between."""


async def answers(service: Service, asks: Sequence[GenerationRequest]) -> AsyncGenerator[Event, None]:
    """The events of all of them as those of one: one ``Begun``, the choices numbered through, one ``Finished``.

    ``Begun`` is the first one's that begins. Closing it ends all of them, and so does an error of one.

    Raises:
        RequestError: of the first that fails.
    """
    queue = asyncio.Queue[Event | Exception | None](AT_ONCE)
    places = asyncio.Semaphore(AT_ONCE)

    async def answer(ask: GenerationRequest, first: int) -> None:
        try:
            async with places, aclosing(cast(AsyncGenerator[Event, None], service.answer(ask))) as events:
                async for event in events:
                    if not isinstance(event, Begun | Finished):
                        event = replace(event, index=event.index + first)
                    await queue.put(event)
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.create_task(answer(ask, n * ask.choices)) for n, ask in enumerate(asks)]
    begun, over, ended = False, 0, list[Finished]()
    try:
        while over < len(tasks):
            event = await queue.get()
            if isinstance(event, Exception):
                raise event
            if event is None:
                over += 1
            elif isinstance(event, Finished):
                ended.append(event)
            elif not (begun and isinstance(event, Begun)):
                begun = begun or isinstance(event, Begun)
                yield event
        if ended:
            yield _sum(ended)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _sum(ends: Sequence[Finished]) -> Finished:
    """Counts add up; of times that pass side by side, the longest."""
    values = {f.name: [getattr(end, f.name) for end in ends] for f in fields(Finished)}
    return Finished(**{name: max(each) if name.endswith("_s") else sum(each) for name, each in values.items()})
