"""State that all addresses of a server share, and responses in JSON, errors among them."""

from __future__ import annotations

import asyncio
import math
import os.path
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Scope

from .api import Api, Defaults, encoded
from .connection import ClientLimits
from .events import Event, RequestError, shutting_down

if TYPE_CHECKING:
    from .service import ModelService

# Response header that lists the request's fields that have no effect.
IGNORED = "x-outcore-ignored"


class Observer:
    """Base of classes that record what a server answers, such as a package's metrics."""

    def responded(self, route: str, status: int) -> None:
        """A request was answered; ``route`` is Starlette's path pattern, or ``none``."""

    def happened(self, event: Event, first_s: float | None) -> None:
        """An event of an answer; ``first_s``: seconds since the request was read, given at the first text or call."""


class Site:
    """One server's state.

    Args:
        apis: the first one also gives the form of errors at unknown paths.
        clock: seconds, for the time-outs of clients.

    Attributes:
        closing: new requests are refused.
        ended: answers under way are ended too.
        under_way: number of requests being answered; ``answered``: number already answered, errors included.
        held_bytes: bytes of bodies that are being read or whose requests wait for their answers.
        turned_away, dropped, late: connections refused for lack of room, closed to make room for others, and closed
            because of a time-out.
        journal: gets a line about each request to a model and each refused one; on the level INFO, about every request.
    """

    def __init__(
        self,
        service: ModelService,
        apis: Sequence[Api],
        limits: ClientLimits | None = None,
        defaults: Defaults | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.service, self.apis = service, tuple(apis)
        self.limits, self.defaults = limits or ClientLimits(), defaults or Defaults()
        self.clock, self.turned_away, self.dropped, self.late = clock, 0, 0, 0
        self.observers: list[Observer] = []
        self.journal: Callable[[str], None] = lambda line: None
        self.closing, self.ended = False, asyncio.Event()
        self.under_way = self.answered = self.held_bytes = 0

    def check_open(self) -> None:
        if self.closing:
            raise shutting_down()

    def refusal(self, scope: Scope, error: RequestError) -> Response:
        """The response for an error, in the form of the API whose paths, and then whose header, are most like those."""
        path, headers = scope["path"], Headers(scope=scope)

        def likeness(api: Api) -> tuple[int, bool]:
            alike = [len(os.path.commonpath(["/" + path.lstrip("/"), route.path])) for route in api.routes]
            return max(alike, default=0), api.header is not None and api.header in headers

        return error_response(max(self.apis, key=likeness), error, scope)

    def refused(self, status: int, message: str) -> bytes:
        return encoded(self.apis[0].error_body(RequestError(message, "connection", status=status)))


def error_response(api: Api, error: RequestError, scope: Scope) -> Response:
    scope["outcore.seen"].why = str(error)  # for the journal
    headers = {"www-authenticate": "Bearer"} if error.status == 401 else None
    response = json_response(api.error_body(error), error.status, headers)
    if error.retry_after is not None:
        response.headers["retry-after"] = str(max(1, math.ceil(error.retry_after)))
    return response


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(encoded(value), status, headers, media_type="application/json")


def ignored_header(fields: Sequence[str]) -> dict[str, str]:
    """The header, if any field is ignored. The names come from the client, hence the limits and the quoting."""
    named = ", ".join(quote(f[:60], safe="_.-[]/") for f in fields[:20])
    return {IGNORED: named} if named else {}
