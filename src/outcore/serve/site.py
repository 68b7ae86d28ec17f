"""What all addresses of a server share, and answers that are no model's: JSON, and errors in an API's words."""

from __future__ import annotations

import asyncio
import math
import os.path
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from starlette.responses import Response

from .api import Api, Defaults, encoded
from .connection import ClientLimits
from .events import Event, RequestError, shutting_down

if TYPE_CHECKING:
    from .service import ModelService

IGNORED = "x-outcore-ignored"
"""The header that names fields of a request that have no effect."""


class Observer:
    """Is told what a server answers; a package's page does something with it."""

    def responded(self, route: str, status: int) -> None:
        """A request was answered; ``route``: its address in Starlette's form, or ``none``."""

    def happened(self, event: Event, first_s: float | None) -> None:
        """An event of a model's answer; ``first_s``: of its first text or call, seconds since the request was read."""


class Site:
    """One server's state.

    Args:
        apis: the first one's words are those of errors that belong to none.
        clock: seconds, by which clients are late.

    Attributes:
        closing: no request is answered any more, but those under way. ``ended``: set when those end, too.
        under_way: requests that were begun and are not answered. ``answered``: those that are, errors among them.
        held_bytes: of bodies that are read, or wait for their answers.
        turned_away, dropped, late: connections that there was no room for, that made room for others, and that were
            closed because of a time-out.
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
        self.closing, self.ended = False, asyncio.Event()
        self.under_way = self.answered = self.held_bytes = 0

    def check_open(self) -> None:
        """Refuse requests while the server shuts down (503)."""
        if self.closing:
            raise shutting_down()

    def refusal(self, path: str, headers: Mapping[str, str], error: RequestError) -> Response:
        """The answer that tells of an error at a path, in the words of the API whose path begins most like it; of
        several, the one whose header is there."""

        def likeness(api: Api) -> tuple[int, bool]:
            alike = [len(os.path.commonpath(["/" + path.lstrip("/"), route.path])) for route in api.routes]
            return max(alike, default=0), api.header is not None and api.header in headers

        return error_response(max(self.apis, key=likeness), error)

    def refused(self, status: int, message: str) -> bytes:
        """The body of an answer to what is no request of any API, or none that is read."""
        return encoded(self.apis[0].error_body(RequestError(message, "connection", status=status)))


def error_response(api: Api, error: RequestError) -> Response:
    """The answer that tells of an error in an API's words."""
    response = json_response(api.error_body(error), error.status)
    if error.retry_after is not None:
        response.headers["retry-after"] = str(max(1, math.ceil(error.retry_after)))
    if error.status == 401:
        response.headers["www-authenticate"] = "Bearer"
    return response


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(encoded(value), status, headers, media_type="application/json")


def ignored_header(fields: Sequence[str]) -> dict[str, str]:
    """The header that names them, if there are any; names are the client's, so not all that they hold may be sent."""
    named = ", ".join(quote(f[:60], safe="_.-[]/") for f in fields[:20])
    return {IGNORED: named} if named else {}
