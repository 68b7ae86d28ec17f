"""Who may ask: by the name that the server is called by, the page that asks, and a key.

A page in a browser reaches a server on this machine though it is none of its business: under a name of its own that
leads to 127.0.0.1 (DNS rebinding; such requests carry that name as their host), or by a request of the kinds that
browsers send without asking first (those carry the page's origin).
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import socket
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from .events import RequestError

OPEN = {"/", "/health"}
"""Paths that need no key."""

LOCAL = re.compile(r"https?://(localhost|127(\.\d{1,3}){3}|\[::1\])(:\d+)?", re.IGNORECASE)
"""Origins of this machine."""

FRAMING = "request_framing"
"""Code of errors after which nobody knows where the next request begins."""


@dataclass(frozen=True)
class Access:
    """Who may ask.

    Attributes:
        key: that requests must carry, as ``Authorization: Bearer KEY`` or ``x-api-key: KEY``; None: none.
        hosts: names that the server may be called by, in small letters without ports; ``*``: any. Addresses of this
            machine, and ``.localhost``, which leads nowhere else (RFC 6761), may always; not ``.internal``, which any
            network's name server answers for. ``addresses``: any address may, which no name leads to.
        origins: of pages in browsers that may ask and read the answers; ``*``: any; ``localhost``: those that come from
            this machine, by whatever port. A page of the server's own may.
    """

    key: str | None = field(default=None, repr=False)
    hosts: Collection[str] = ()
    addresses: bool = False
    origins: Collection[str] = ()

    def check(self, path: str, headers: Headers) -> None:
        """Refuse who may not.

        Raises:
            RequestError: 403 or 401.
        """
        host = headers.get("host")
        if host is not None and not self._called(_name(host)):
            raise RequestError(
                f"this server is not called {host[:100]!r}; --allowed-hosts names what it may be called",
                "host_not_allowed",
                status=403,
            )
        origin = headers.get("origin")
        if origin is not None and not self._may_ask(origin, host):
            raise RequestError(
                f"pages of {origin[:100]!r} may not ask; --allowed-origins names those that may",
                "origin_not_allowed",
                status=403,
            )
        if self.key is not None and path not in OPEN and not _carries(headers, self.key):
            raise RequestError("give the server's API key, as Bearer or x-api-key", "invalid_api_key", status=401)

    def _called(self, name: str) -> bool:
        if "*" in self.hosts or name in self.hosts or name == "localhost" or name.endswith(".localhost"):
            return True
        try:
            address = ipaddress.ip_address(name.partition("%")[0])
        except ValueError:
            return False
        return self.addresses or address.is_loopback

    def shared_with(self, origin: str) -> bool:
        """Whether pages of this origin, which is not the server's own, may ask and read."""
        local = "localhost" in self.origins and LOCAL.fullmatch(origin) is not None
        return local or "*" in self.origins or origin in self.origins

    def _may_ask(self, origin: str, host: str | None) -> bool:
        own = host is not None and origin.lower() in (f"http://{host.lower()}", f"https://{host.lower()}")
        return own or self.shared_with(origin)


class Guard:
    """ASGI middleware that answers requests that are refused by their head: of those who may not ask, with headers that
    are too large, or with a body whose length is told in two ways.

    h11 looks at the size of headers only while they are not whole, and takes ``Content-Length`` beside
    ``Transfer-Encoding``, which a proxy in front may read otherwise (RFC 9112, 6.3): where one sees a body's end, the
    other sees another's request. The connection is closed.
    """

    def __init__(
        self, app: ASGIApp, access: Access, header_bytes: int, refusal: Callable[[str, Headers, RequestError], Response]
    ) -> None:
        self.app, self.access, self.header_bytes, self.refusal = app, access, header_bytes, refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        try:
            self._check_framing(scope)
            self.access.check(scope["path"], headers)
        except RequestError as e:
            response = self.refusal(scope["path"], headers, e)
            if e.code == FRAMING:
                response.headers["connection"] = "close"
            await response(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def _check_framing(self, scope: Scope) -> None:
        headers = scope["headers"]
        size = len(scope["raw_path"]) + len(scope["query_string"]) + sum(len(k) + len(v) + 4 for k, v in headers)
        if size > self.header_bytes:
            raise RequestError(f"the headers have more than {self.header_bytes} bytes", FRAMING, status=431)
        if {b"content-length", b"transfer-encoding"} <= {name for name, _ in headers}:
            raise RequestError("give either Content-Length or Transfer-Encoding", FRAMING)


def local_names(host: str) -> set[str]:
    """What this machine is called where it listens at ``host``; no name server is asked."""
    own = socket.gethostname().lower()
    return {host.lower(), own, own.partition(".")[0], own.partition(".")[0] + ".local"} - {""}


class Cors(CORSMiddleware):
    """Tells browsers which pages may read; those that ask beforehand are told 200 either way, and read it in headers.

    Cookies are let through (``credentials``), since some apps send them with all they ask; there is none here that
    would say anything.
    """

    def __init__(self, app: ASGIApp, access: Access, exposed: Sequence[str]) -> None:
        self.access = access
        super().__init__(
            app,
            tuple(access.origins),
            ("GET", "POST", "DELETE", "OPTIONS"),
            allow_headers=("*",),
            allow_credentials=True,
            expose_headers=exposed,
        )

    def is_allowed_origin(self, origin: str) -> bool:
        return self.access.shared_with(origin)

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        response.status_code = 200
        return response


def _name(host: str) -> str:
    """A Host header without its port, and an IPv6 address without brackets."""
    name = host.strip().lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.partition(":")[0].removesuffix(".")


def _carries(headers: Headers, key: str) -> bool:
    """Compared in a time that says nothing of the key, nor of its length."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    given = [token.strip()] if scheme.lower() == "bearer" else []
    wanted = hashlib.sha256(key.encode()).digest()
    found = False
    for word in [*given, headers.get("x-api-key", "")]:
        # Headers are bytes, which Starlette reads as Latin-1.
        found |= hmac.compare_digest(hashlib.sha256(word.encode("latin-1")).digest(), wanted)
    return found
