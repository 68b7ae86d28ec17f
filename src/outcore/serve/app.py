"""The HTTP application: the addresses of all APIs, and those that belong to none."""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route as StarletteRoute
from starlette.types import Message, Receive, Scope, Send

from ..machine.heap import give_back
from ..monitoring.publisher import board
from . import page
from .access import Access, Guard, cors
from .api import Api, HttpRequest, ParsedRequest, Route
from .body import HeldBody
from .delivery import deliver, while_there
from .description import described
from .events import Called, Event, RequestError, TextPart
from .metrics import Counted
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
    middleware = [Middleware(Counted, site.metrics), *([cors(access, IGNORED)] if access.origins else [])]
    middleware.append(Middleware(Guard, access, site.limits.header_bytes, site.refusal))

    def missing(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 404
        what = "no such address" if status == 404 else f"{request.method}: not here"
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
    """Addresses without an API."""

    async def health(_: Request) -> Response:
        state = site.service.state()
        status = "closing" if site.closing else state.get("status", "ok")
        told = {"status": status, "running": state.get("running", 0), "waiting": state.get("waiting", 0)}
        return json_response(told, 503 if status == "closing" else 200)

    async def front(request: Request) -> Response:
        if "text/html" in request.headers.get("accept", ""):  # programs that look for a server take anything
            return page.page()
        return PlainTextResponse("Outcore is running", headers={"Vary": "Accept"})

    async def metrics(request: Request) -> Response:
        return site.metrics.response(request.headers.get("accept", ""))

    async def openapi(_: Request) -> Response:
        return json_response(described(site.apis))

    watched = page.Events(board.snapshot, lambda: site.closing).response
    own = {"/": front, page.EVENTS: watched, "/health": health, "/metrics": metrics, "/openapi.json": openapi}
    return [StarletteRoute(path, answer, methods=["GET"]) for path, answer in own.items()]


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
            await self._answer(route, request, sending, body)
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
            await body.work(give_back)

    async def _answer(self, route: Route, http: Request, send: Send, body: HeldBody) -> None:
        site = self.site
        request = HttpRequest(await body.read(http), http.path_params, site.defaults)
        began = time.monotonic()
        site.check_open()
        handled = await body.work(route.handle, request, site.service)
        del request
        if isinstance(handled, ParsedRequest):
            work = deliver(self._counted(handled, body, began), handled.answering, send, site)
        else:

            async def tell() -> None:
                value = await handled if inspect.isawaitable(handled) else handled
                await json_response(value)(http.scope, http.receive, send)

            work = tell()
        await while_there(work, http.receive)

    async def _counted(self, asked: ParsedRequest, body: HeldBody, began: float) -> AsyncGenerator[Event, None]:
        """The events of an answer, as metrics count them; the first of them needs the body no more."""
        metrics, first = self.site.metrics, True
        async with aclosing(self.site.service.answer(*asked.asks)) as events:
            async for event in events:
                body.release()
                if first and isinstance(event, TextPart | Called):
                    first = False
                    metrics.first_token.observe(time.monotonic() - began)
                metrics.event(event)
                yield event
