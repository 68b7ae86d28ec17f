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
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from starlette.datastructures import Headers
from starlette.middleware import Middleware
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
        host, origin = headers.get("host"), headers.get("origin")
        if host is not None and not self._called(_name(host)):
            why = f"this server is not called {host[:100]!r}; --allowed-hosts names what it may be called"
            raise RequestError(why, "host_not_allowed", status=403)
        own = host is not None and (origin or "").lower() in (f"http://{host.lower()}", f"https://{host.lower()}")
        if origin is not None and not own and not self._shared_with(origin):
            why = f"pages of {origin[:100]!r} may not ask; --allowed-origins names those that may"
            raise RequestError(why, "origin_not_allowed", status=403)
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

    def _shared_with(self, origin: str) -> bool:
        local = "localhost" in self.origins and LOCAL.fullmatch(origin) is not None
        return local or "*" in self.origins or origin in self.origins


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
        size = len(scope["raw_path"]) + len(scope["query_string"]) + sum(len(k) + len(v) + 4 for k, v in headers.raw)
        try:
            if size > self.header_bytes:
                raise RequestError(f"the headers have more than {self.header_bytes} bytes", FRAMING, status=431)
            if "content-length" in headers and "transfer-encoding" in headers:
                raise RequestError("give either Content-Length or Transfer-Encoding", FRAMING)
            self.access.check(scope["path"], headers)
        except RequestError as e:
            response = self.refusal(scope["path"], headers, e)
            if e.code == FRAMING:
                response.headers["connection"] = "close"
            await response(scope, receive, send)
        else:
            await self.app(scope, receive, send)


def local_names(host: str) -> set[str]:
    """What this machine is called where it listens at ``host``; no name server is asked."""
    own = socket.gethostname().lower()
    return {host.lower(), own, own.partition(".")[0], own.partition(".")[0] + ".local"} - {""}


def cors(access: Access, exposed: str) -> Middleware:
    """What tells browsers which pages may read. Cookies are let through, since some apps send them with all they ask;
    there is none here that would say anything."""
    return Middleware(
        CORSMiddleware,
        tuple(access.origins),
        ("GET", "POST", "DELETE", "OPTIONS"),
        allow_headers=("*",),
        allow_credentials=True,
        allow_origin_regex=LOCAL.pattern if "localhost" in access.origins else None,
        expose_headers=(exposed,),
    )


def _name(host: str) -> str:
    """A Host header without its port, and an IPv6 address without brackets."""
    name = host.strip().lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.partition(":")[0].removesuffix(".")


def _carries(headers: Headers, key: str) -> bool:
    """Compared in a time that says nothing of the key, nor of its length."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    given = [token.strip() if scheme.lower() == "bearer" else "", headers.get("x-api-key", "")]
    wanted = hashlib.sha256(key.encode()).digest()
    # Headers are bytes, which Starlette reads as Latin-1.
    found = [hmac.compare_digest(hashlib.sha256(word.encode("latin-1")).digest(), wanted) for word in given]
    return any(found)
