"""One path of the server, answered by the APIs that have it."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.types import Message, Receive, Scope, Send

from .delivery import Delivery, while_there
from .endpoint import Api, Asked, Endpoint, Request, Route
from .exchange import Called, Event, Piece, RequestError
from .responses import error_response, json_response
from .several import answers
from .site import Site

__all__ = ["Address"]

log = logging.getLogger("outcore")


class Address:
    """An ASGI application for a path.

    Args:
        methods: for each, the APIs that answer it there; of several that whose header a request has, else the first
            that has none.
    """

    def __init__(self, site: Site, path: str, methods: Mapping[str, Sequence[tuple[Api, Endpoint | Route]]]) -> None:
        self.site, self.path, self.methods = site, path, methods

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, started = HttpRequest(scope, receive), False
        api, endpoint = self._chosen(request)

        async def sending(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        self.site.under_way += 1
        try:
            await self._answer(endpoint, request, sending)
        except ClientDisconnect:
            pass
        except RequestError as e:
            await error_response(api, e)(scope, receive, send)
        except Exception:
            log.exception("%s %s failed", request.method, self.path)
            if started:
                raise
            error = RequestError("something went wrong; the server's log says what", "internal_error", status=500)
            await error_response(api, error)(scope, receive, send)
        finally:
            self.site.under_way -= 1
            self.site.answered += 1

    def _chosen(self, request: HttpRequest) -> tuple[Api, Endpoint | Route]:
        there = self.methods["GET" if request.method == "HEAD" else request.method]
        named = [pair for pair in there if pair[0].header is not None and pair[0].header in request.headers]
        return (named or [pair for pair in there if pair[0].header is None] or list(there))[0]

    async def _answer(self, endpoint: Endpoint | Route, http: HttpRequest, send: Send) -> None:
        self.site.check_open()
        body = await self.site.bodies.read(http)
        began = time.monotonic()
        self.site.check_open()
        request = Request(
            body, dict(http.headers), http.path_params, dict(http.query_params), defaults=self.site.defaults
        )
        service = self.site.service
        if isinstance(endpoint, Route):
            handled = endpoint.handle(request, service)
        else:
            asked = endpoint.parse(request)
            if isinstance(asked, Asked):
                await self._deliver(asked, began, http.receive, send)
                return
            handled = asked.handle(service)

        async def tell() -> None:
            await json_response(await handled)(http.scope, http.receive, send)

        await while_there(tell(), http.receive)

    async def _deliver(self, asked: Asked, began: float, receive: Receive, send: Send) -> None:
        metrics, first = self.site.metrics, True

        def on_event(event: Event) -> None:
            nonlocal first
            if first and isinstance(event, Piece | Called):
                first = False
                metrics.first_token.observe(time.monotonic() - began)
            metrics.event(event)

        events = answers(self.site.service, asked.asks)
        delivery = Delivery(events, asked.answering, self.site.limits.keepalive_s, on_event)
        self.site.deliveries.add(delivery)
        try:
            await while_there(delivery.send_to(send), receive)
        finally:
            self.site.deliveries.discard(delivery)
