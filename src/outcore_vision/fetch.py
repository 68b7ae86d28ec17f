"""Gets pictures from http and https addresses, and never from the networks that this machine is in.

A name is resolved once, every address that it has is checked, and the connection is made to a checked one, so a name
cannot be resolved otherwise between the check and the connection. Each redirect is checked like the first address.
Proxies of the environment are not used, since they would resolve names themselves. Only the ports 80 and 443 are
reached. No cookies, no credentials and no referrer are sent.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from urllib.parse import SplitResult, urljoin, urlsplit

from outcore.text import one_line, shortened
from outcore.version import __version__

from .formats import PictureError

MOST_BYTES, MOST_SECONDS, MOST_REDIRECTS, MOST_TRIED, LONGEST = 20_000_000, 20.0, 5, 4, 4096
PORTS = {"http": 80, "https": 443}
REDIRECTS = (301, 302, 303, 307, 308)

# Not public, whatever the installed Python's ``ipaddress`` says; of IPv6, ways to write IPv4 addresses.
CLOSED = [
    ipaddress.ip_network(each)
    for each in ("100.64.0.0/10", "192.0.0.0/24", "64:ff9b::/32", "2002::/16", "2001::/23", "::/64", "fec0::/10")
]

# Resolves a host's name and port to IP addresses.
Resolver = Callable[[str, int], Sequence[str]]


def resolved(host: str, port: int) -> list[str]:
    """Returns the IP addresses of a name, by the system's resolver."""
    return [str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


def allowed(address: str) -> bool:
    """Whether an IP address is one of the public internet: not private, shared, local, multicast or reserved, and not
    an IPv6 address that wraps an IPv4 one."""
    if "%" in address:
        return False
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return False
    if any(ip in network for network in CLOSED):
        return False
    return ip.is_global and not (ip.is_multicast or ip.is_reserved or ip.is_unspecified or ip.is_link_local)


def fetched(
    url: str, resolve: Resolver = resolved, *, allows: Callable[[str], bool] = allowed, ports: bool = True
) -> bytes:
    """Returns what is at an address.

    Args:
        resolve: resolves names.
        allows: whether an IP address may be reached.
        ports: only the schemes' own ports may be reached.

    Raises:
        PictureError: the address is not allowed, does not answer in time, or answers with an error or too much.
    """
    until = time.monotonic() + MOST_SECONDS
    for _ in range(MOST_REDIRECTS + 1):
        parts = _checked(url, ports)
        try:
            found = _get(parts, _addresses(parts, resolve, allows), until)
            _left(until)  # what was cut off by the clock looks complete
        except (OSError, http.client.HTTPException, ValueError) as e:
            if isinstance(e, PictureError):
                raise
            late = isinstance(e, TimeoutError) or time.monotonic() >= until
            why = f"no answer within {MOST_SECONDS:g} s" if late else shortened(one_line(e) or type(e).__name__, 200)
            raise PictureError(f"{_shown(parts)}: {why}") from None
        if isinstance(found, bytes):
            return found
        url = urljoin(url, found)
    raise PictureError(f"{_shown(parts)}: more than {MOST_REDIRECTS} redirects")


def _checked(url: str, ports: bool) -> SplitResult:
    """Splits an address. Raises PictureError for one that is not plain http(s)."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        raise PictureError("not an address") from None
    if len(url) > LONGEST or not url.isascii() or any(c <= " " or c in '"<>\\^`{|}\x7f' for c in url):
        raise PictureError(f"not an address: at most {LONGEST} characters are needed, others than ASCII as %XX")
    if parts.scheme not in PORTS or not host:
        raise PictureError("an http or https address is needed")
    if "@" in parts.netloc:
        raise PictureError("addresses with a user or password are not fetched")
    if ports and port not in (None, PORTS[parts.scheme]):
        raise PictureError(f"only port {PORTS[parts.scheme]} is reached by {parts.scheme}")
    return parts


def _shown(parts: SplitResult) -> str:
    """Returns an address for errors, without its query, which may be a secret."""
    return shortened(f"{parts.scheme}://{parts.netloc}{parts.path}", 200)


def _port(parts: SplitResult) -> int:
    return parts.port or PORTS[parts.scheme]


def _addresses(parts: SplitResult, resolve: Resolver, allows: Callable[[str], bool]) -> list[str]:
    host = parts.hostname or ""
    try:
        found = list(dict.fromkeys(resolve(host, _port(parts))))
    except OSError:
        found = []
    if not found or not all(allows(address) for address in found):
        # Neither which address nor whether there is one: that would tell the client of a server about its network.
        raise PictureError(f"{_shown(parts)}: not a public address, or not known; only the public internet is reached")
    return found


def _get(parts: SplitResult, addresses: Sequence[str], until: float) -> bytes | str:
    """Returns the answer's body, or the address of a redirect."""
    connection = http.client.HTTPConnection(parts.hostname or "", _port(parts), timeout=_left(until))
    with ExitStack() as stack:
        sock = stack.enter_context(closing(_connected(parts, addresses, until)))
        if parts.scheme == "https":
            context = ssl.create_default_context()
            sock = context.wrap_socket(sock, server_hostname=parts.hostname, do_handshake_on_connect=False)
            stack.enter_context(closing(sock))
        # Each read has a time-out of its own, and a server may send a byte now and then.
        clock = threading.Timer(_left(until), partial(_cut, sock))
        clock.daemon = True
        clock.start()
        stack.callback(clock.cancel)
        if isinstance(sock, ssl.SSLSocket):
            sock.do_handshake()
        connection.sock = sock  # so it makes no connection itself
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        headers = {"User-Agent": f"outcore/{__version__}", "Accept": "image/*", "Accept-Encoding": "identity"}
        connection.request("GET", path, headers={"Host": parts.netloc, **headers})
        answer = stack.enter_context(closing(connection.getresponse()))
        if answer.status in REDIRECTS and (there := answer.getheader("Location")):
            return there
        if answer.status != 200:
            raise PictureError(f"{_shown(parts)}: the server answers {answer.status}")
        if (coding := answer.getheader("Content-Encoding", "identity").lower()) not in ("identity", ""):
            raise PictureError(f"{_shown(parts)}: compressed once more ({shortened(coding, 20)})")
        return _body(answer, parts)


def _cut(sock: socket.socket) -> None:
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _connected(parts: SplitResult, addresses: Sequence[str], until: float) -> socket.socket:
    """Connects to the first of the checked addresses that answers. The name is not resolved again."""
    error = OSError("no address")
    for address in addresses[:MOST_TRIED]:
        try:
            return socket.create_connection((address, _port(parts)), timeout=_left(until))
        except OSError as e:
            error = e
    raise error


def _body(answer: http.client.HTTPResponse, parts: SplitResult) -> bytes:
    data, large = bytearray(), PictureError(f"{_shown(parts)}: larger than {MOST_BYTES} bytes")
    if answer.length is not None and answer.length > MOST_BYTES:
        raise large
    while part := answer.read1(1 << 16):
        data += part
        if len(data) > MOST_BYTES:
            raise large
    if answer.length:
        raise PictureError(f"{_shown(parts)}: the answer is cut off")
    return bytes(data)


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
