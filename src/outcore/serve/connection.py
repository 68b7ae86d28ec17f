"""uvicorn's connection with time-outs, and a connection limit that idle clients cannot exhaust.

uvicorn has a time-out between requests only, and refuses new connections beyond its limit, so that idle clients keep
others out. Here the server calls ``Connection.look`` on all connections several times a second; h11's two states say
what each waits for. This relies on parts of ``H11Protocol`` that uvicorn 0.34 to 0.54 have: ``connections``, ``conn``,
``cycle``, ``transport``; calls of ``data_received``, ``on_response_complete`` and ``send_400_response``; and that
``connection_lost`` ends the cycle.
"""

from __future__ import annotations

import asyncio
import http
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

if TYPE_CHECKING:
    from .site import Site


@dataclass(frozen=True)
class ClientLimits:
    """Limits of connections and requests.

    Attributes:
        connections: limit of open ones; beyond it, the connection that has waited longest for its client is closed.
        header_s: seconds from a request's first byte to the end of its headers.
        body_s: seconds for a body, plus one for each ``body_rate`` bytes received.
        idle_s: seconds between requests.
        write_s: seconds in which the client reads nothing of an answer that waits for it.
        linger_s: seconds to receive the rest of a body whose request was answered before the body's end.
        keepalive_s: seconds of silence after which a stream sends a keep-alive.
        body_bytes: of one request; all bodies held at once have at most four times as many. A prompt of a million
            tokens has about 4 MB, more where characters are escaped.
        values: limit of commas and brackets in a body's JSON. A parsed value takes 60 bytes of memory or more for 2
            bytes of the body; parsing this many object names blocks other requests for 0.09 s.
    """

    connections: int = 512
    header_s: float = 10.0
    body_s: float = 30.0
    body_rate: int = 64 * 1024
    idle_s: float = 75.0
    write_s: float = 30.0
    linger_s: float = 5.0
    keepalive_s: float = 10.0
    header_bytes: int = 32 * 1024
    body_bytes: int = 8_000_000
    values: int = 200_000


class Connection(H11Protocol):
    """One client's connection; the server makes a subclass with its ``site``.

    Attributes:
        awaited: what it waits for: the client's ``request``, ``headers``, ``body`` or ``rest`` (of a request that is
            already answered), or ``us``.
        since: time by the site's clock when ``awaited`` changed; ``received``: bytes since then.
        full: the write buffer is full, because the client does not read.
        refused: the connection is closed as soon as the client has read the refusal.
    """

    site: ClassVar[Site]

    awaited, since, received = "us", 0.0, 0
    full = refused = False
    _unread, _read_at = 0, 0.0  # bytes in the write buffer, and when the client last read some

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        room = len(self.connections) < self.site.limits.connections
        if not room and (waiting := [c for c in self.connections if isinstance(c, Connection) and c.waits]):
            # A client that reads its answer is never dropped.
            min(waiting, key=lambda c: c.since).drop()
            self.site.dropped, room = self.site.dropped + 1, True
        super().connection_made(transport)
        self._mark()
        if not room:
            self.site.turned_away += 1
            self._answer(503, "too many connections", b"retry-after: 1\r\n")
            self.drop(transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # after an error uvicorn's timer would keep this object alive

    def data_received(self, data: bytes) -> None:
        if self.refused or self.transport.is_closing():
            return
        self.received += len(data)
        super().data_received(data)
        self._mark()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._mark()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.full, self.since = True, self.site.clock()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.full = False

    def send_400_response(self, msg: str) -> None:
        # Called while h11's error is handled, which has the status: 431 for headers that are too long.
        error = sys.exception()
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        self._refuse(status, f"not an HTTP request: {error}" if error is not None else msg)

    @property
    def waits(self) -> bool:
        return self.awaited != "us" or self.full

    def look(self) -> None:
        self._mark()  # uvicorn may have closed it
        limits, now, unread = self.site.limits, self.site.clock(), self.transport.get_write_buffer_size()
        if not unread or not self._unread or unread < self._unread:
            self._read_at = now
        self._unread = unread
        if now - self._read_at > limits.write_s:
            self.site.late += 1
            self.transport.abort()
            return
        allowed = {
            "request": limits.idle_s, "headers": limits.header_s, "rest": limits.linger_s,
            "body": limits.body_s + self.received / limits.body_rate,
        }.get(self.awaited, math.inf)  # fmt: skip
        if now - self.since <= allowed:
            return
        if self.awaited in ("headers", "body"):
            self.site.late += 1
            self._refuse(408, f"the {self.awaited} came too slowly")
        elif self.awaited == "request":
            self.transport.close()
        else:
            self.transport.abort()

    def drop(self, close: Callable[[], None] | None = None) -> None:
        """Close at once, and free the place among the connections."""
        self.refused = True
        self.connections.discard(self)
        (close or self.transport.abort)()

    def _refuse(self, status: int, message: str) -> None:
        """Send an error unless an answer has begun, and let the client close the connection.

        Closing with unread input would reset the connection, and the client might lose the answer (RFC 9112, 9.6).
        """
        self.refused = True
        answered = self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE)
        if self.cycle is not None and not self.cycle.response_complete:
            # Ends the application's answer at once; uvicorn would wait until the client has read everything.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if answered:
            self.transport.close()
            return
        self._answer(status, message)
        self.transport.write_eof()
        self.flow.resume_reading()
        self._mark()

    def _answer(self, status: int, message: str, more: bytes = b"") -> None:
        body = self.site.refused(status, message)
        head = f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n".encode()
        length = b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(head + more + length + body)

    def _mark(self) -> None:
        their, awaited = self.conn.their_state, "us"
        if self.refused:
            awaited = "rest"
        elif their is h11.IDLE:
            awaited = "headers" if self.conn.trailing_data[0] else "request"
        elif their is h11.SEND_BODY:
            awaited = "body" if self.conn.our_state is h11.SEND_RESPONSE else "rest"
        if self.transport.is_closing():
            awaited = "us"
        if awaited != self.awaited:
            self.awaited, self.since, self.received = awaited, self.site.clock(), 0
