"""A connection that is closed when its client is late: uvicorn's, with time-outs, and a limit that its holders lose.

uvicorn's own limits are a time-out between requests, and 503 beyond a number of connections, which whoever holds them
then keeps; it waits for ever for the rest of headers or of a body, and for a client to read. What a connection waits
for follows from h11's two states. The server looks at all of them several times a second (``Connection.look``), so
there are no timers for each. What of uvicorn's ``H11Protocol`` is relied on, as it is in 0.34 to 0.54:
``connections``, ``conn``, ``cycle``, ``transport``; that ``data_received``, ``on_response_complete`` and
``send_400_response`` are called on it, and that ``connection_lost`` ends the cycle.
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
    """What a client may take.

    Attributes:
        connections: at most; beyond them the one goes that has waited for its client the longest.
        header_s: seconds from a request's first byte to the end of its headers.
        body_s, body_rate: seconds for its body, and one more for each so many bytes that have come.
        idle_s: seconds without a request.
        write_s: seconds in which a client takes nothing of what is there for it.
        linger_s: seconds for the rest of a body that was answered before its end.
        keepalive_s: seconds without anything sent after which a stream says that it lives.
        header_bytes, body_bytes: of one request. A prompt of a million tokens has 4 MB or so, more where characters are
            escaped. Of all bodies that are read, or wait for their answers, there are four times as many at most.
        values: of a body's JSON, told by commas and brackets: each costs 60 bytes or more, of 2 bytes of the body. So
            many names of objects are read in 0.09 s, in which nobody else is heard.
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
    """A subclass of it, with a ``site``, is what uvicorn is configured with.

    Attributes:
        awaited: what it waits for: ``request``, ``headers``, ``body`` or ``rest`` (of a request that was answered
            already) of its client, or ``us``; ``since`` when, by the site's clock.
        received: bytes that came since.
        full: so much is unread that no more is written.
    """

    site: ClassVar[Site]

    awaited, since, received = "us", 0.0, 0
    full = refused = False
    _unread, _taken_at = 0, 0.0  # bytes that wait for the client to take them, and when there were more than now

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        room = len(self.connections) < self.site.limits.connections
        if not room and (waiting := [c for c in self.connections if isinstance(c, Connection) and c.waits]):
            # Of those whose requests are answered, and which read, none is dropped.
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
        self._unset_keepalive_if_required()  # uvicorn keeps the timer, and all of this with it, after an error

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
        # Called where h11 raised what says which status it is: 431 for headers that are too long.
        error = sys.exception()
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        self._refuse(status, f"not an HTTP request: {error}" if error is not None else msg)

    @property
    def waits(self) -> bool:
        return self.awaited != "us" or self.full

    def look(self) -> None:
        self._mark()  # uvicorn closes connections on its own, too
        limits, now, unread = self.site.limits, self.site.clock(), self.transport.get_write_buffer_size()
        if not unread or not self._unread or unread < self._unread:
            self._taken_at = now
        self._unread = unread
        if now - self._taken_at > limits.write_s:
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
        """Close it at once, and count it no longer."""
        self.refused = True
        self.connections.discard(self)
        (close or self.transport.abort)()

    def _refuse(self, status: int, message: str) -> None:
        """Answer in place of the application, if it has not begun to, and close when the client has done so.

        Where something is left that was not read, closing at once would reset the connection, and an answer that is
        still under way would be lost (RFC 9112, 9.6).
        """
        self.refused = True
        answered = self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE)
        if self.cycle is not None and not self.cycle.response_complete:
            # It is told at once, not when all that was written is read.
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
        """A whole answer, after which the connection is closed."""
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
