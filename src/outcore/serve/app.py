"""The HTTP application: the addresses of all APIs, and those that belong to none, and answers on their way to clients.

An answer goes out event by event as they come, or whole; it ends when the client goes, or the server does. The engine
never waits for a client: events queue in the service. What is queued is an answer's own text and no more, which
``max_tokens`` bounds; a client that takes nothing for ``ClientLimits.write_s`` loses its connection, and with it the
answer.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route as StarletteRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..machine.memory import free_heap
from ..packages import modules
from .access import Access, Guard, cors
from .api import EVENT_STREAM, Api, HttpRequest, ParsedRequest, ResponseWriter, Route
from .body import HeldBody
from .events import Called, Event, RequestError, TextPart, shutting_down
from .site import IGNORED, Site, error_response, ignored_header, json_response

log = logging.getLogger("outcore")

RETURNED = 1 << 20
"""Bytes of a body after which memory is given back to the system."""


def application(site: Site, access: Access | None = None) -> Starlette:
    """Everything that the server answers.

    Args:
        access: who may ask; None: whoever calls it by a name of this machine, no page in a browser but its own.
    """
    access = access or Access()
    middleware = [Middleware(Watched, site), *([cors(access, IGNORED)] if access.origins else [])]
    middleware.append(Middleware(Guard, access, site.limits.header_bytes, site.refusal))

    def missing(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 404
        what = "no such address" if status == 404 else f"{request.method}: not here"
        if not modules("apis"):
            what += " (only OpenAI's chats and completions are installed; install outcore whole)"
        told = RequestError(f"{request.url.path}: {what}", "not_found", status=status)
        response = site.refusal(request.url.path, request.headers, told)
        response.headers.update(getattr(error, "headers", None) or {})
        return response

    routes: dict[tuple[str, str], list[tuple[Api, Route]]] = {}
    for api in site.apis:
        for route in api.routes:
            routes.setdefault((route.path, route.method), []).append((api, route))
    app = Starlette(
        routes=[
            *_own(site),
            *(StarletteRoute(p, Address(site, there), methods=[method]) for (p, method), there in routes.items()),
        ],
        middleware=middleware,
        exception_handlers={HTTPException: missing},
    )
    app.router.redirect_slashes = False
    return app


def _own(site: Site) -> list[StarletteRoute]:
    """Addresses without an API: whether the server runs, and what packages bring. A package's module of the group
    ``pages`` has ``routes(site)``, which returns some."""

    async def health(_: Request) -> Response:
        state = site.service.state()
        status = "closing" if site.closing else state.get("status", "ok")
        told = {"status": status, "running": state.get("running", 0), "waiting": state.get("waiting", 0)}
        return json_response(told, 503 if status == "closing" else 200)

    brought = [route for module in modules("pages").values() for route in module.routes(site)]
    return [StarletteRoute("/health", health, methods=["GET"]), *brought]


class Watched:
    """ASGI middleware that tells a site's observers of answers by route and status."""

    def __init__(self, app: ASGIApp, site: Site) -> None:
        self.app, self.site = app, site

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def telling(message: Message) -> None:
            if message["type"] == "http.response.start":
                # What a client calls its path is not told: there is no end of those.
                route = getattr(scope.get("route"), "path", "none")
                for observer in self.site.observers:
                    observer.responded(route, message["status"])
            await send(message)

        await self.app(scope, receive, telling if scope["type"] == "http" else send)


class Address:
    """An ASGI application for a path and a method.

    Args:
        there: the APIs that answer it there; of several that whose header a request has, else the first that has none.
    """

    def __init__(self, site: Site, there: Sequence[tuple[Api, Route]]) -> None:
        self.site, self.there = site, there

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, started, body = Request(scope, receive), False, HeldBody(self.site)
        api, route = max(self.there, key=lambda pair: pair[0].header in request.headers if pair[0].header else 0.5)

        async def sending(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        self.site.under_way += 1
        try:
            self.site.check_open()
            await self._answer(api, route, request, sending, body)
        except ClientDisconnect:
            pass
        except RequestError as e:
            # Where it was raised, all of the body is.
            e.__traceback__ = e.__cause__ = e.__context__ = None
            await error_response(api, e)(scope, receive, send)
        except Exception:
            log.exception("%s %s failed", request.method, route.path)
            if started:
                raise
            error = RequestError("something went wrong; the server's log says what", "internal_error", status=500)
            await error_response(api, error)(scope, receive, send)
        finally:
            body.release()
            self.site.under_way -= 1
            self.site.answered += 1
        if body.received > RETURNED:
            await body.work(free_heap)

    async def _answer(self, api: Api, route: Route, http: Request, send: Send, body: HeldBody) -> None:
        site = self.site
        request = HttpRequest(site.service, await body.read(http), http.path_params, site.defaults)
        began = time.monotonic()
        site.check_open()
        handled = await body.work(route.handle, request)
        del request
        if isinstance(handled, ParsedRequest):
            work = _deliver(self._told(handled, body, began), handled.writer, send, site, api)
        else:

            async def tell() -> None:
                value = await handled if inspect.isawaitable(handled) else handled
                await json_response(value)(http.scope, http.receive, send)

            work = tell()
        await _while_there(work, http.receive)

    async def _told(self, asked: ParsedRequest, body: HeldBody, began: float) -> AsyncGenerator[Event, None]:
        """The events of an answer, of which observers are told; the first of them needs the body no more."""
        first = True
        async with aclosing(self.site.service.answer(*asked.requests)) as events:
            async for event in events:
                body.release()
                begins = first and isinstance(event, TextPart | Called)
                for observer in self.site.observers:
                    observer.happened(event, time.monotonic() - began if begins else None)
                first = first and not begins
                yield event


async def _deliver(
    events: AsyncGenerator[Event, None], writer: ResponseWriter, send: Send, site: Site, api: Api
) -> None:
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
            await tell(writer.sent(writer.failure(e, api.error_body(e))), more=False)


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


async def _while_there(work: Coroutine[Any, Any, None], receive: Receive) -> None:
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
