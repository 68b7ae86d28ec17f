"""The HTTP application: the addresses of all APIs, and those that belong to none."""

from __future__ import annotations

from collections.abc import Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route as HttpRoute
from starlette.types import Receive, Scope, Send

from ..monitoring.publisher import board
from . import page
from .access import Access, AccessGuard, Cors
from .address import Address
from .description import described
from .endpoint import Api, Endpoint, Route, encoded
from .exchange import RequestError
from .framing import Framing
from .metrics import Counted
from .responses import IGNORED, addresses, error_response, json_response
from .site import Site

__all__ = ["application"]


def application(site: Site, access: Access | None = None) -> Starlette:
    """Everything that the server answers.

    Args:
        access: who may ask; None: whoever calls it by a name of this machine, no page in a browser but its own.
    """
    access = access or Access()
    middleware = [Middleware(Counted, site.metrics), Middleware(Framing, site.limits, site.errors)]
    if access.origins:
        middleware.append(Middleware(Cors, access, (IGNORED,)))
    middleware.append(Middleware(AccessGuard, access, site.errors))

    def missing(request: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        what = "no such address" if error.status_code == 404 else f"{request.method}: not here"
        told = RequestError(f"{request.url.path}: {what}", "not_found", status=error.status_code)
        return error_response(site.errors.api(request.url.path, request.headers), told, error.headers)

    app = Starlette(
        routes=[*_own(site, access), *_of_apis(site)],
        middleware=middleware,
        exception_handlers={HTTPException: missing},
    )
    app.router.redirect_slashes = False
    return app


class _Page:
    """An address without an API."""

    def __init__(self, path: str, answer: Callable[[HttpRequest], Response]) -> None:
        self.path, self.answer = path, answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.answer(HttpRequest(scope, receive))(scope, receive, send)


def _own(site: Site, access: Access) -> list[HttpRoute]:
    description = encoded(described(site.apis, key=access.key is not None))

    def health(_: HttpRequest) -> Response:
        state = site.service.state()
        status = "closing" if site.closing else state.get("status", "ok")
        told = {"status": status, "running": state.get("running", 0), "waiting": state.get("waiting", 0)}
        response = json_response(told)
        response.status_code = 503 if status == "closing" else 200
        return response

    def front(request: HttpRequest) -> Response:
        if page.wanted(request):
            return page.page()
        return PlainTextResponse("Outcore is running", headers={"Vary": "Accept"})

    events = page.Events(board.snapshot, lambda: site.closing)

    def watched(request: HttpRequest) -> Response:
        try:
            return events.response(request)
        except RequestError as e:
            return error_response(site.errors.api(page.EVENTS, request.headers), e)

    pages = [
        _Page("/", front),
        _Page(page.EVENTS, watched),
        _Page("/health", health),
        _Page("/metrics", lambda request: site.metrics.response(request.headers.get("accept", ""))),
        _Page("/openapi.json", lambda _: Response(description, media_type="application/json")),
    ]
    return [HttpRoute(page.path, page, methods=["GET"]) for page in pages]


def _of_apis(site: Site) -> list[HttpRoute]:
    paths: dict[str, dict[str, list[tuple[Api, Endpoint | Route]]]] = {}
    for api in site.apis:
        for there in addresses(api):
            paths.setdefault(there.path, {}).setdefault(there.method, []).append((api, there))
    return [HttpRoute(p, Address(site, p, methods), methods=list(methods)) for p, methods in paths.items()]
