"""An answer on its way to a client: events as they come, or whole; ended when the client goes, or the server does.

The engine never waits for a client: events queue here. What is queued is an answer's own text and no more, which
``max_tokens`` bounds; a client that takes nothing for ``Limits.write_s`` loses its connection, and with it the answer.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Send

from .endpoint import EVENT_STREAM, ResponseWriter, encoded
from .exchange import Event, RequestError
from .responses import ignored_header

__all__ = ["Delivery", "while_there"]

log = logging.getLogger("outcore")


class Delivery:
    """One answer.

    Args:
        events: of it; closed at the end, however that comes.
        keepalive_s: seconds without anything sent after which a stream says that it lives.
        on_event: called with each event when it comes.
    """

    def __init__(
        self,
        events: AsyncGenerator[Event, None],
        answering: ResponseWriter,
        keepalive_s: float,
        on_event: Callable[[Event], None] = lambda event: None,
    ) -> None:
        self.events, self.answering, self.keepalive_s, self.on_event = events, answering, keepalive_s, on_event
        self._queue: asyncio.Queue[Event | RequestError | None] = asyncio.Queue()
        self._started = False

    def end(self, error: RequestError) -> None:
        """End it with an error, behind what there is already."""
        self._queue.put_nowait(error)

    async def send_to(self, send: Send) -> None:
        """Send all of it.

        Raises:
            RequestError: it failed before anything was sent.
        """
        pump = asyncio.create_task(self._pump())
        try:
            if self.answering.streams:
                await self._stream(send)
            else:
                await self._whole(send)
        finally:
            pump.cancel()
            await asyncio.wait((pump,))

    async def _pump(self) -> None:
        end: RequestError | None = None
        try:
            async with aclosing(self.events):
                async for event in self.events:
                    self.on_event(event)
                    self._queue.put_nowait(event)
        except RequestError as e:
            end = e
        except Exception:
            log.exception("an answer failed")
            end = RequestError("the answer failed; the server's log says why", "internal_error", status=500)
        self._queue.put_nowait(end)

    async def _whole(self, send: Send) -> None:
        events: list[Event] = []
        while (item := await self._queue.get()) is not None:
            if isinstance(item, RequestError):
                raise item
            events.append(item)
        body = encoded(self.answering.whole(events))
        headers = ignored_header(self.answering.ignored)
        response = Response(body, 200, headers, media_type=self.answering.media_type)
        await send({"type": "http.response.start", "status": 200, "headers": response.raw_headers})
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, send: Send) -> None:
        opened, done, sent_at = False, False, time.monotonic()
        while not done:
            item: Event | RequestError | None
            data = b""
            try:
                async with asyncio.timeout(sent_at + self.keepalive_s - time.monotonic()):
                    item = await self._queue.get()
            except TimeoutError:
                data = (b"" if opened else self.answering.opening()) + self.answering.keepalive()
                opened = True
            else:
                if not opened:
                    data, opened = self.answering.opening(), True
                more, done = self._told(item)
                data += more
            if data:
                await self._send(send, data)
                sent_at = time.monotonic()
        if self._started:
            await send({"type": "http.response.body", "body": b""})

    def _told(self, item: Event | RequestError | None) -> tuple[bytes, bool]:
        """What is sent for it and for all that has come with it, and whether that is the end.

        Raises:
            RequestError: it failed, and nothing has been sent.
        """
        data = b""
        while True:
            if item is None:
                return data + self.answering.closing(), True
            if isinstance(item, RequestError):
                if not self._started:
                    raise item
                return data + self.answering.failed(item), True
            data += self.answering.event(item)
            if self._queue.empty():
                return data, False
            item = self._queue.get_nowait()

    async def _send(self, send: Send, data: bytes) -> None:
        if not self._started:
            self._started = True
            headers = ignored_header(self.answering.ignored)
            if self.answering.media_type == EVENT_STREAM:
                # Proxies are not to keep it until it is whole (nginx: ngx_http_upstream_module, X-Accel-Buffering).
                headers |= {"cache-control": "no-cache", "x-accel-buffering": "no"}
            response = Response(None, 200, headers, media_type=self.answering.media_type)
            kept = [(k, v) for k, v in response.raw_headers if k != b"content-length"]
            await send({"type": "http.response.start", "status": 200, "headers": kept})
        await send({"type": "http.response.body", "body": data, "more_body": True})


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
        for task in (working, waiting):
            task.cancel()
        await asyncio.gather(working, waiting, return_exceptions=True)
