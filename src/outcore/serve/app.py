"""The HTTP application: the addresses of all APIs, and those that belong to none."""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as StarletteRequest
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route as StarletteRoute
from starlette.types import Message, Receive, Scope, Send

from ..machine.memory import free_heap
from ..monitoring.publisher import board
from . import page
from .access import Access, Cors, Guard
from .api import Api, HttpRequest, ParsedRequest, Route
from .body import HeldBody
from .delivery import deliver, while_there
from .description import described
from .events import Called, Event, RequestError, TextPart
from .metrics import Counted
from .several import answers
from .site import IGNORED, Site, error_response, json_response

log = logging.getLogger("outcore")

RETURNED = 1 << 20
"""Bytes of a body after which memory is given back to the system."""


def application(site: Site, access: Access | None = None) -> Starlette:
    """Everything that the server answers.

    Args:
        access: who may ask; None: whoever calls it by a name of this machine, no page in a browser but its own.
    """
    access = access or Access()
    middleware = [Middleware(Counted, site.metrics)]
    if access.origins:
        middleware.append(Middleware(Cors, access, (IGNORED,)))
    middleware.append(Middleware(Guard, access, site.limits.header_bytes, site.refusal))

    def missing(request: StarletteRequest, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        what = "no such address" if error.status_code == 404 else f"{request.method}: not here"
        told = RequestError(f"{request.url.path}: {what}", "not_found", status=error.status_code)
        return error_response(site.api(request.url.path, request.headers), told, error.headers)

    paths: dict[str, dict[str, list[tuple[Api, Route]]]] = {}
    for api in site.apis:
        for route in api.routes:
            paths.setdefault(route.path, {}).setdefault(route.method, []).append((api, route))
    app = Starlette(
        routes=[
            *(StarletteRoute(own.path, own, methods=["GET"]) for own in _own(site, access)),
            *(StarletteRoute(p, Address(site, p, methods), methods=list(methods)) for p, methods in paths.items()),
        ],
        middleware=middleware,
        exception_handlers={HTTPException: missing},
    )
    app.router.redirect_slashes = False
    return app


class _Page:
    """An address without an API."""

    def __init__(self, path: str, answer: Callable[[StarletteRequest], Response]) -> None:
        self.path, self.answer = path, answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.answer(StarletteRequest(scope, receive))(scope, receive, send)


def _own(site: Site, access: Access) -> list[_Page]:
    def health(_: StarletteRequest) -> Response:
        state = site.service.state()
        status = "closing" if site.closing else state.get("status", "ok")
        told = {"status": status, "running": state.get("running", 0), "waiting": state.get("waiting", 0)}
        return json_response(told, 503 if status == "closing" else 200)

    def front(request: StarletteRequest) -> Response:
        if page.wanted(request):
            return page.page()
        return PlainTextResponse("Outcore is running", headers={"Vary": "Accept"})

    events = page.Events(board.snapshot, lambda: site.closing)

    def watched(request: StarletteRequest) -> Response:
        try:
            return events.response()
        except RequestError as e:
            return site.refusal(page.EVENTS, request.headers, e)

    return [
        _Page("/", front),
        _Page(page.EVENTS, watched),
        _Page("/health", health),
        _Page("/metrics", lambda request: site.metrics.response(request.headers.get("accept", ""))),
        _Page("/openapi.json", lambda _: json_response(described(site.apis, key=access.key is not None))),
    ]


class Address:
    """An ASGI application for a path.

    Args:
        methods: for each, the APIs that answer it there; of several that whose header a request has, else the first
            that has none.
    """

    def __init__(self, site: Site, path: str, methods: Mapping[str, Sequence[tuple[Api, Route]]]) -> None:
        self.site, self.path, self.methods = site, path, methods

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, started, body = StarletteRequest(scope, receive), False, self.site.body()
        api, route = self._chosen(request)

        async def sending(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        self.site.under_way += 1
        try:
            self.site.check_open()
            await self._answer(route, request, sending, body)
        except ClientDisconnect:
            pass
        except RequestError as e:
            # Where it was raised, all of the body is.
            e.__traceback__ = e.__cause__ = e.__context__ = None
            await error_response(api, e)(scope, receive, send)
        except Exception:
            log.exception("%s %s failed", request.method, self.path)
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

    def _chosen(self, request: StarletteRequest) -> tuple[Api, Route]:
        there = self.methods["GET" if request.method == "HEAD" else request.method]
        named = [pair for pair in there if pair[0].header is not None and pair[0].header in request.headers]
        return (named or [pair for pair in there if pair[0].header is None] or list(there))[0]

    async def _answer(self, route: Route, http: StarletteRequest, send: Send, body: HeldBody) -> None:
        site = self.site
        request = HttpRequest(await body.read(http), http.path_params, site.defaults)
        began = time.monotonic()
        site.check_open()
        handled = await body.work(route.handle, request, site.service)
        del request
        if isinstance(handled, ParsedRequest):
            events = self._counted(handled, body, began)
            work = deliver(events, handled.answering, send, site.ended, site.limits.keepalive_s)
        else:

            async def tell() -> None:
                value = await handled if inspect.isawaitable(handled) else handled
                await json_response(value)(http.scope, http.receive, send)

            work = tell()
        await while_there(work, http.receive)

    async def _counted(self, asked: ParsedRequest, body: HeldBody, began: float) -> AsyncGenerator[Event, None]:
        """The events of an answer, as metrics count them; the first of them needs the body no more."""
        metrics, first = self.site.metrics, True
        async with aclosing(answers(self.site.service, asked.asks)) as events:
            async for event in events:
                body.release()
                if first and isinstance(event, TextPart | Called):
                    first = False
                    metrics.first_token.observe(time.monotonic() - began)
                metrics.event(event)
                yield event
