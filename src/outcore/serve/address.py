"""One path of the server, answered by the APIs that have it."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive, Scope, Send

from ..machine.heap import give_back
from .delivery import Delivery, while_there
from .endpoint import Api, Endpoint, HttpRequest, ParsedRequest, Route
from .exchange import Called, Event, RequestError, TextPart
from .json_body import HeldBody
from .off_loop import off_loop
from .responses import error_response, json_response
from .several import answers
from .site import Site

__all__ = ["Address"]

log = logging.getLogger("outcore")

RETURNED = 1 << 20
"""Bytes of a body after which memory is given back to the system."""


class Address:
    """An ASGI application for a path.

    Args:
        methods: for each, the APIs that answer it there; of several that whose header a request has, else the first
            that has none.
    """

    def __init__(self, site: Site, path: str, methods: Mapping[str, Sequence[tuple[Api, Endpoint | Route]]]) -> None:
        self.site, self.path, self.methods = site, path, methods

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, started, nbytes = Request(scope, receive), False, 0
        api, endpoint = self._chosen(request)

        async def sending(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        self.site.under_way += 1
        try:
            self.site.check_open()
            with self.site.bodies.hold() as held:
                try:
                    await self._answer(endpoint, request, sending, held)
                finally:
                    nbytes = held.received
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
            self.site.under_way -= 1
            self.site.answered += 1
        if nbytes > RETURNED:
            await off_loop(give_back)

    def _chosen(self, request: Request) -> tuple[Api, Endpoint | Route]:
        there = self.methods["GET" if request.method == "HEAD" else request.method]
        named = [pair for pair in there if pair[0].header is not None and pair[0].header in request.headers]
        return (named or [pair for pair in there if pair[0].header is None] or list(there))[0]

    async def _answer(self, endpoint: Endpoint | Route, http: Request, send: Send, held: HeldBody) -> None:
        body = await held.read(http)
        began = time.monotonic()
        self.site.check_open()
        request = HttpRequest(
            body,
            dict(http.headers),
            http.path_params,
            dict(http.query_params),
            defaults=self.site.defaults,
            large=held.large,
        )
        del body
        service = self.site.service
        if isinstance(endpoint, Route):
            handled = endpoint.handle(request, service)
        else:
            asked = await request.read(endpoint.parse)
            del request
            if isinstance(asked, ParsedRequest):
                await self._deliver(asked, began, http.receive, send, held)
                return
            handled = asked.handle(service)

        async def tell() -> None:
            await json_response(await handled)(http.scope, http.receive, send)

        await while_there(tell(), http.receive)

    async def _deliver(self, asked: ParsedRequest, began: float, receive: Receive, send: Send, held: HeldBody) -> None:
        metrics, first = self.site.metrics, True

        def on_event(event: Event) -> None:
            nonlocal first
            held.release()
            if first and isinstance(event, TextPart | Called):
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
