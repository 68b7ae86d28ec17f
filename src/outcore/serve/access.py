"""Access control by the Host header, the Origin header and an API key.

A page from elsewhere can reach a server on this machine through the browser: under a name of its own that resolves to
127.0.0.1 (DNS rebinding; the Host header has that name), or by requests that browsers send without a preflight (the
Origin header names the page).
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

# Nobody's data; all but the first two are the page's own files.
KEYLESS_PATHS = re.compile(r"/|/health|/page/.*|/sw\.js|/manifest\.webmanifest|/_app/version\.json")
LOCAL = re.compile(r"https?://(localhost|127(\.\d{1,3}){3}|\[::1\])(:\d+)?", re.IGNORECASE)
# Error code of requests whose end is unknown, so that the connection must be closed.
FRAMING = "request_framing"


@dataclass(frozen=True)
class Access:
    """Which requests are allowed.

    Attributes:
        key: required as ``Authorization: Bearer KEY`` or ``x-api-key: KEY``; None: no key is required.
        hosts: allowed Host headers, lower case, without ports; ``*``: any. Loopback addresses and ``.localhost``, which
            always resolves to this machine (RFC 6761), are always allowed; ``.internal`` is not, since any network's
            name server may answer for it.
        addresses: any IP address is allowed as Host header.
        origins: of pages that may send requests and read answers; ``*``: any; ``localhost``: of this machine, on any
            port. The server's own pages are always allowed.
    """

    key: str | None = field(default=None, repr=False)
    hosts: Collection[str] = ()
    addresses: bool = False
    origins: Collection[str] = ()

    def check(self, path: str, headers: Headers) -> None:
        """Raise a RequestError (401 or 403) for a request that is not allowed."""
        host, origin = headers.get("host"), headers.get("origin")
        if host is not None and not self._allows_host(_name(host)):
            why = f"the host name {host[:100]!r} is not allowed; add it with --allowed-hosts"
            raise RequestError(why, "host_not_allowed", status=403)
        own = host is not None and (origin or "").lower() in (f"http://{host.lower()}", f"https://{host.lower()}")
        local = origin is not None and "localhost" in self.origins and LOCAL.fullmatch(origin) is not None
        if origin is not None and not (own or local or "*" in self.origins or origin in self.origins):
            why = f"pages of {origin[:100]!r} are not allowed; add this origin with --allowed-origins"
            raise RequestError(why, "origin_not_allowed", status=403)
        if self.key is not None and not KEYLESS_PATHS.fullmatch(path) and (why := _wrong(headers, self.key)):
            raise RequestError(why, "invalid_api_key", status=401)

    def _allows_host(self, name: str) -> bool:
        if "*" in self.hosts or name in self.hosts or name == "localhost" or name.endswith(".localhost"):
            return True
        try:
            address = ipaddress.ip_address(name.partition("%")[0])
        except ValueError:
            return False
        return self.addresses or address.is_loopback


class Guard:
    """ASGI middleware that refuses requests by their headers: access denied, too large, or two body lengths.

    h11 checks the size of headers only while they are incomplete. It also accepts both ``Content-Length`` and
    ``Transfer-Encoding`` and uses one; if a proxy uses the other (RFC 9112, 6.3), part of a body would be read as
    another client's request. After such a request the connection is closed.
    """

    def __init__(
        self, app: ASGIApp, access: Access, header_bytes: int, refusal: Callable[[Scope, RequestError], Response]
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
            response = self.refusal(scope, e)
            if e.code == FRAMING:
                response.headers["connection"] = "close"
            await response(scope, receive, send)
        else:
            await self.app(scope, receive, send)


def local_names(host: str) -> set[str]:
    """Names of this machine when it listens at ``host``, without a DNS lookup."""
    own = socket.gethostname().lower()
    return {host.lower(), own, own.partition(".")[0], own.partition(".")[0] + ".local"} - {""}


class Cors(CORSMiddleware):
    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        response.status_code = 200  # also where refused: browsers stop for lack of a header
        return response


def cors(access: Access, exposed: str) -> Middleware:
    """CORS headers. Credentials are allowed because some apps send cookies with every request; none is read here."""
    return Middleware(
        Cors,
        tuple(access.origins),
        ("GET", "POST", "DELETE", "OPTIONS"),
        allow_headers=("*",),
        allow_credentials=True,
        allow_origin_regex=LOCAL.pattern if "localhost" in access.origins else None,
        expose_headers=(exposed,),
    )


def _name(host: str) -> str:
    name = host.strip().lower()
    return name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0].removesuffix(".")


def _wrong(headers: Headers, key: str) -> str:
    """What is wrong with a request's key, if anything. Compares in constant time; hashing hides the length too."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    given = [token.strip() if scheme.lower() == "bearer" else "", headers.get("x-api-key", "")]
    wanted = hashlib.sha256(key.encode()).digest()
    # Headers are bytes, which Starlette reads as Latin-1.
    found = [hmac.compare_digest(hashlib.sha256(word.encode("latin-1")).digest(), wanted) for word in given]
    missing = "give the server's API key, as Bearer or x-api-key"
    return "" if any(found) else "the API key given is not the server's" if any(given) else missing
