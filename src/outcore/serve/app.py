"""The HTTP application: it routes requests to APIs and sends their answers.

The engine never waits for a client: the service queues an answer's events, which ``max_tokens`` bounds. A client that
reads nothing for ``ClientLimits.write_s`` loses its connection, and its answer is cancelled.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from difflib import get_close_matches
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
from ..text import shortened
from . import completions, openai
from .access import Access, Guard, cors
from .api import EVENT_STREAM, Api, HttpRequest, ParsedRequest, ResponseWriter, Route
from .events import Begun, Called, Event, Finished, RequestError, TextPart, shutting_down
from .requests import HeldBody
from .site import IGNORED, Site, error_response, ignored_header, json_response

log = logging.getLogger("outcore")

# Size in bytes of a body after which freed memory is returned to the system.
RETURNED = 1 << 20


def application(site: Site, access: Access | None = None) -> Starlette:
    """The ASGI application of all APIs, ``/health``, and ``routes(site)`` of packages' modules of the group ``pages``.

    Args:
        access: None: requests must name this machine as host, and no other site's page may send any.
    """
    access = access or Access()
    middleware = [Middleware(Observed, site), *([cors(access, IGNORED)] if access.origins else [])]
    middleware.append(Middleware(Guard, access, site.limits.header_bytes, site.refusal))

    def missing(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 404
        what, headers = "no such address", getattr(error, "headers", None) or {}
        if "Allow" in headers:
            what = f"{request.method} is not allowed, use {' or '.join(sorted(headers['Allow'].split(', ')))}"
        elif near := get_close_matches(request.url.path, [path for path, _ in routes if "{" not in path], 1, 0.8):
            what += f", did you mean {near[0]}?"
        if not modules("apis"):
            what += " (without the package outcore_apis, this server has only OpenAI's chats and completions)"
        why = RequestError(f"{request.scope['path']}: {what}", "not_found", status=status)
        response = site.refusal(request.scope, why)
        response.headers.update(headers)
        return response

    async def health(_: Request) -> Response:
        state = site.service.state()
        status = "closing" if site.closing else state.get("status", "ok")
        body = {"status": status, "running": state.get("running", 0), "waiting": state.get("waiting", 0)}
        return json_response(body, 503 if status == "closing" else 200)

    routes: dict[tuple[str, str], list[tuple[Api, Route]]] = {}
    for api, route in ((a, r) for a in site.apis for r in a.routes):
        routes.setdefault((route.path, route.method), []).append((api, route))
    app = Starlette(
        routes=[
            StarletteRoute("/health", health, methods=["GET"]),
            *(route for module in modules("pages").values() for route in module.routes(site)),
            *(StarletteRoute(p, Address(site, pairs), methods=[method]) for (p, method), pairs in routes.items()),
        ],
        middleware=middleware,
        exception_handlers={HTTPException: missing},
    )
    app.router.redirect_slashes = False
    return app


@dataclass
class Seen:
    """What a line of the journal tells, kept in the ASGI scope. ``complete``: the response was sent to its end."""

    status: int = 0
    complete: bool = False
    model: str = ""
    asked: str = ""  # the model that the request named
    why: str = ""  # it was refused
    begun: Begun | Finished | None = None
    finished: Finished | None = None

    def line(self, scope: Scope) -> str:
        other = f" for {shortened(self.asked, 80)}" if self.asked not in ("", self.model) else ""
        parts = [time.strftime("%Y-%m-%d %H:%M:%S"), (scope.get("client") or "-")[0], shortened(self.model) + other]
        if self.begun is not None:
            parts.append(f"in {self.begun.prompt_tokens}  cached {self.begun.cached_tokens}")
        if (end := self.finished) is not None:
            # The first token comes at the end of the prompt.
            speed = (end.tokens - end.choices) / end.generation_s if end.generation_s else 0.0
            parts.append(f"out {end.tokens}  {speed:.2f} tok/s")
        failed = self.begun is not None and self.finished is None
        status = "client left" if not self.complete else "failed" if failed and self.status < 400 else self.status
        parts.append(f"{status} {shortened(scope['method'], 20)} {shortened(scope['path'], 80)}")
        parts.append(shortened(self.why.removeprefix(f"{scope['path']}: "), 80))
        return "  ".join(part for part in parts if part)


class Observed:
    """ASGI middleware that tells the site's observers each response's route and status, and writes the journal."""

    def __init__(self, app: ASGIApp, site: Site) -> None:
        self.app, self.site = app, site

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        seen = scope["outcore.seen"] = Seen()

        async def reporting(message: Message) -> None:
            if message["type"] == "http.response.start":
                seen.status = message["status"]
                # The route, not the path: clients can make up any number of paths.
                route = getattr(scope.get("route"), "path", "none")
                for observer in self.site.observers:
                    observer.responded(route, message["status"])
            await send(message)
            seen.complete |= message["type"] == "http.response.body" and not message.get("more_body")

        try:
            await self.app(scope, receive, reporting)
        finally:
            if seen.model or seen.status >= 400 or log.isEnabledFor(logging.INFO):
                self.site.journal(seen.line(scope))


class Address:
    """An ASGI application for one path and method.

    Args:
        pairs: the APIs that have this route. The API whose header the request has answers, else the first without one.
    """

    def __init__(self, site: Site, pairs: Sequence[tuple[Api, Route]]) -> None:
        self.site, self.pairs = site, pairs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, started, body = Request(scope, receive), False, HeldBody(self.site)
        api, route = max(self.pairs, key=lambda pair: pair[0].header in request.headers if pair[0].header else 0.5)

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
            # The frames of its traceback refer to the whole body, which can be freed now.
            e.__traceback__ = e.__cause__ = e.__context__ = None
            await error_response(api, e, scope)(scope, receive, send)
        except Exception:
            log.exception("%s %s failed", request.method, route.path)
            if started:
                raise
            error = RequestError("something went wrong; the server's log says what", "internal_error", status=500)
            await error_response(api, error, scope)(scope, receive, send)
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

        async def respond() -> None:
            made = await handled if inspect.isawaitable(handled) else handled
            if not isinstance(made, ParsedRequest):
                await json_response(made)(http.scope, http.receive, send)
                return
            seen = http.scope["outcore.seen"]
            seen.asked = made.requests[0].model
            seen.model = seen.asked or "-"
            await _deliver(self._events(made, body, began, seen), made.writer, send, site, api)

        await _while_connected(respond(), http.receive)

    async def _events(
        self, parsed: ParsedRequest, body: HeldBody, began: float, seen: Seen
    ) -> AsyncGenerator[Event, None]:
        """The events of an answer, reported to observers and in ``seen``; releases the body at the first one."""
        first = True
        async with aclosing(self.site.service.answer(*parsed.requests)) as events:
            async for event in events:
                body.release()
                if isinstance(event, Begun):
                    seen.begun, seen.model = event, event.model
                elif isinstance(event, Finished):
                    seen.begun = seen.finished = event
                begins = first and isinstance(event, TextPart | Called)
                for observer in self.site.observers:
                    observer.happened(event, time.monotonic() - began if begins else None)
                first = first and not begins
                yield event


async def _deliver(
    events: AsyncGenerator[Event, None], writer: ResponseWriter, send: Send, site: Site, api: Api
) -> None:
    """Send an answer; always closes ``events``. Raises RequestError if it fails before anything was sent."""
    async with aclosing(events), aclosing(_with_silences(events, site)) as arriving:
        if not writer.streams:
            body = writer.whole([event async for event in arriving if event is not None])
            response = json_response(body, headers=ignored_header(writer.ignored))
            await send({"type": "http.response.start", "status": 200, "headers": response.raw_headers})
            await send({"type": "http.response.body", "body": response.body})
            return
        started = False

        async def write(data: bytes, more: bool = True) -> None:
            nonlocal started
            if not started:
                started = True
                await send({"type": "http.response.start", "status": 200, "headers": _stream_headers(writer)})
            await send({"type": "http.response.body", "body": data, "more_body": more})

        try:
            async for event in arriving:
                if data := writer.keepalive() if event is None else writer.sent(writer.steps(event)):
                    await write(data)
            await write(writer.closing(), more=False)
        except RequestError as e:
            if not started:
                raise
            await write(writer.sent(writer.failure(e, api.error_body(e))), more=False)


def _stream_headers(writer: ResponseWriter) -> list[tuple[bytes, bytes]]:
    headers = ignored_header(writer.ignored)
    if writer.media_type == EVENT_STREAM:
        # Keeps proxies from buffering the stream (nginx: ngx_http_proxy_module, X-Accel-Buffering).
        headers |= {"cache-control": "no-cache", "x-accel-buffering": "no"}
    response = Response(None, 200, headers, media_type=writer.media_type)
    return [(k, v) for k, v in response.raw_headers if k != b"content-length"]


async def _with_silences(events: AsyncGenerator[Event, None], site: Site) -> AsyncGenerator[Event | None, None]:
    """The events, and None after each ``keepalive_s`` without one.

    Raises:
        RequestError: the answer failed, or the server shuts down.
    """

    async def next_event() -> Event | None:
        return await anext(events, None)

    over, waiting = asyncio.create_task(site.ended.wait()), asyncio.create_task(next_event())
    try:
        while True:
            silence_s = site.limits.keepalive_s
            await asyncio.wait((waiting, over), timeout=silence_s, return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                if (event := waiting.result()) is None:
                    return
                yield event
                waiting = asyncio.create_task(next_event())
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
        await _cancel(over, waiting)


async def _while_connected(work: Coroutine[Any, Any, None], receive: Receive) -> None:
    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, waiting = asyncio.create_task(work), asyncio.create_task(disconnected())
    try:
        await asyncio.wait((working, waiting), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            await working
    finally:
        await _cancel(working, waiting)


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


OPENAI = Api("openai", openai.error_body, (*openai.ROUTES, *completions.ROUTES))


def all_apis() -> tuple[Api, ...]:
    return (OPENAI, *(api for module in modules("apis").values() for api in module.APIS))
