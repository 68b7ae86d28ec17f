"""What all addresses of a server share, and answers that are no model's: JSON, and errors in an API's words."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from starlette.responses import Response

from .api import JSON, Api, Defaults, encoded
from .body import HeldBody
from .connection import ConnectionGate
from .events import RequestError, Service
from .limits import ClientLimits
from .metrics import ServerMetrics

IGNORED = "x-outcore-ignored"
"""The header that names fields of a request that have no effect."""

RETRY_S = 5.0
"""Seconds after which a client may ask again: by then another server may be there."""


class Site:
    """One server's state.

    Args:
        apis: the first one's words are those of errors that belong to none.
        clock: seconds, by which clients are late.

    Attributes:
        closing: no request is answered any more, but those under way. ``ended``: set when those end, too.
        under_way: requests that were begun and are not answered. ``answered``: those that are, errors among them.
    """

    def __init__(
        self,
        service: Service,
        apis: Sequence[Api],
        limits: ClientLimits | None = None,
        defaults: Defaults | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.service, self.apis = service, tuple(apis)
        self.limits, self.defaults = limits or ClientLimits(), defaults or Defaults()
        self.gate = ConnectionGate(self.limits, self._refusal, clock)
        self.metrics = ServerMetrics(service, self.gate)
        self.closing, self.ended = False, asyncio.Event()
        self.under_way = self.answered = 0
        self._held = [0]

    @property
    def held_bytes(self) -> int:
        """Of bodies that are read, or wait for their answers."""
        return self._held[0]

    def body(self) -> HeldBody:
        """The body of one request."""
        return HeldBody(self.limits, self._held)

    def check_open(self) -> None:
        """Refuse requests while the server shuts down.

        Raises:
            RequestError: it does (503).
        """
        if self.closing:
            raise shutting_down()

    def api(self, path: str, headers: Mapping[str, str]) -> Api:
        """The API that has the path, or else most of its beginning; of several, the one whose header is there."""

        def likeness(api: Api) -> tuple[int, bool]:
            shared = max((_shared(path, route.path) for route in api.routes), default=0)
            return shared, api.header is not None and api.header in headers

        return max(self.apis, key=likeness)

    def refusal(self, path: str, headers: Mapping[str, str], error: RequestError) -> Response:
        """The answer that tells of an error at a path."""
        return error_response(self.api(path, headers), error)

    def _refusal(self, path: str | None, status: int, message: str) -> bytes:
        return bytes(self.refusal(path or "/", {}, RequestError(message, "connection", status=status)).body)


def shutting_down() -> RequestError:
    """What a request is told that comes too late, or takes too long then."""
    return RequestError("the server is shutting down", "shutting_down", status=503, retry_after=RETRY_S)


def error_response(api: Api, error: RequestError, headers: Mapping[str, str] | None = None) -> Response:
    """The answer that tells of an error in an API's words; with further ``headers``."""
    sent = dict(headers or {})
    if error.retry_after is not None:
        sent["retry-after"] = str(max(1, math.ceil(error.retry_after)))
    if error.status == 401:
        sent["www-authenticate"] = "Bearer"
    return json_response(api.error_body(error), error.status, sent)


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """An answer of JSON."""
    return Response(encoded(value), status, headers, media_type=JSON)


def ignored_header(fields: Sequence[str]) -> dict[str, str]:
    """The header that names them, if there are any; names are the client's, so not all that they hold may be sent."""
    named = ", ".join(quote(f[:60], safe="_.-[]/") for f in fields[:20])
    return {IGNORED: named} if named else {}


def _shared(path: str, known: str) -> int:
    """Segments that two paths begin with; a parameter is any."""
    count = 0
    for a, b in zip(path.strip("/").split("/"), known.strip("/").split("/"), strict=False):
        if a != b and not b.startswith("{"):
            break
        count += 1
    return count
