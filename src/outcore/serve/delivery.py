"""An answer on its way to a client: events as they come, or whole; ended when the client goes, or the server does.

The engine never waits for a client: events queue in the service. What is queued is an answer's own text and no more,
which ``max_tokens`` bounds; a client that takes nothing for ``ClientLimits.write_s`` loses its connection, and with it
the answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Send

from .api import EVENT_STREAM, ResponseWriter
from .events import Event, RequestError
from .site import Site, ignored_header, json_response, shutting_down

log = logging.getLogger("outcore")


async def deliver(events: AsyncGenerator[Event, None], writer: ResponseWriter, send: Send, site: Site) -> None:
    """Send an answer.

    Args:
        events: closed at the end, however that comes.

    Raises:
        RequestError: it failed before anything was sent.
    """
    async with aclosing(events), aclosing(_heard(events, site)) as heard:
        if not writer.streams:
            body = writer.whole([event async for event in heard if event is not None])
            response = json_response(body, headers=ignored_header(writer.ignored))
            await send({"type": "http.response.start", "status": 200, "headers": response.raw_headers})
            await send({"type": "http.response.body", "body": response.body})
            return
        started = False

        async def tell(data: bytes, more: bool = True) -> None:
            nonlocal started
            if not started:
                started = True
                await send({"type": "http.response.start", "status": 200, "headers": _stream_headers(writer)})
            if data or not more:
                await send({"type": "http.response.body", "body": data, "more_body": more})

        try:
            async for event in heard:
                if data := writer.keepalive() if event is None else writer.sent(writer.steps(event)):
                    await tell(data)
            await tell(writer.closing(), more=False)
        except RequestError as e:
            if not started:
                raise
            await tell(writer.sent(writer.failure(e)), more=False)


def _stream_headers(writer: ResponseWriter) -> list[tuple[bytes, bytes]]:
    headers = ignored_header(writer.ignored)
    if writer.media_type == EVENT_STREAM:
        # Proxies are not to keep it until it is whole (nginx: ngx_http_upstream_module, X-Accel-Buffering).
        headers |= {"cache-control": "no-cache", "x-accel-buffering": "no"}
    response = Response(None, 200, headers, media_type=writer.media_type)
    return [(k, v) for k, v in response.raw_headers if k != b"content-length"]


async def _heard(events: AsyncGenerator[Event, None], site: Site) -> AsyncGenerator[Event | None, None]:
    """The events; None whenever none has come for so long that a client may wonder.

    Raises:
        RequestError: the answer failed, or the server ends.
    """

    async def following() -> Event | None:
        return await anext(events, None)

    over, waiting = asyncio.create_task(site.ended.wait()), asyncio.create_task(following())
    try:
        while True:
            patience_s = site.limits.keepalive_s
            await asyncio.wait((waiting, over), timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                if (event := waiting.result()) is None:
                    return
                yield event
                waiting = asyncio.create_task(following())
            elif over.done():
                raise shutting_down()
            else:
                yield None
    except (RequestError, asyncio.CancelledError):
        raise
    except Exception as e:
        log.exception("an answer failed")
        raise RequestError("the answer failed; the server's log says why", "internal_error", status=500) from e
    finally:
        await _cancelled(over, waiting)


async def while_there(work: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Do some work for a client; ended when it has gone."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, waiting = asyncio.create_task(work), asyncio.create_task(gone())
    try:
        await asyncio.wait((working, waiting), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            await working
    finally:
        await _cancelled(working, waiting)


async def _cancelled(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
