"""Requests whose head is refused before anything is done by it."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from .exchange import RequestError
from .limits import ClientLimits
from .responses import Errors

__all__ = ["Framing"]


class Framing:
    """ASGI middleware that refuses headers that are too large, and a body whose length is told in two ways.

    h11 looks at the size of headers only while they are not whole, and takes ``Content-Length`` beside
    ``Transfer-Encoding``, which a proxy in front may read otherwise (RFC 9112, 6.3): where one sees a body's end, the
    other sees another's request. The connection is closed.
    """

    def __init__(self, app: ASGIApp, limits: ClientLimits, errors: Errors) -> None:
        self.app, self.limits, self.errors = app, limits, errors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (error := self._wrong(scope)) is not None:
            headers = Headers(scope=scope)
            response = self.errors.response(scope["path"], headers, error)
            response.headers["connection"] = "close"
            await response(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _wrong(self, scope: Scope) -> RequestError | None:
        headers = scope["headers"]
        most = self.limits.header_bytes
        size = len(scope["raw_path"]) + len(scope["query_string"]) + sum(len(k) + len(v) + 4 for k, v in headers)
        if size > most:
            return RequestError(f"the headers have more than {most} bytes", "request_too_large", status=431)
        if {b"content-length", b"transfer-encoding"} <= {name for name, _ in headers}:
            return RequestError("give either Content-Length or Transfer-Encoding")
        return None
