"""A connection that is closed when its client is late. uvicorn's, with time-outs, and a limit that its holders lose.

Which ``Phase`` a connection is in follows from h11's two states. The server looks at all of them several times a second
(``Connection.look``), so there are no timers to be kept for each. What of uvicorn's ``H11Protocol`` is relied on, as it
is in 0.34 to 0.54: ``connections``, ``conn``, ``cycle``, ``scope``, ``transport``; that ``data_received``,
``on_response_complete`` and ``send_400_response`` are called on it, and that ``connection_lost`` ends the cycle.
"""

from __future__ import annotations

import asyncio
import http
import socket
import struct
import sys
import time
from collections.abc import Callable
from enum import Enum
from typing import ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from .limits import ClientLimits


class ConnectionGate:
    """The connections of a server: lets new ones in, and knows which wait for their clients.

    Args:
        refusal: of a path (None: it is not known yet), a status and a message: an answer's body, in the words of the
            path's API.
        clock: seconds.

    Attributes:
        waiting: for their clients to send a request or to read an answer, those first that have done so the longest.
        turned_away, dropped, late: connections that there was no room for, that made room for others, and that were
            closed because of a time-out.
    """

    def __init__(
        self,
        limits: ClientLimits,
        refusal: Callable[[str | None, int, str], bytes],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits, self.refusal, self.clock = limits, refusal, clock
        self.waiting: dict[Connection, None] = {}
        self.turned_away = self.dropped = self.late = 0

    def admits(self, connections: int) -> bool:
        """Whether there is room for one beside so many; if need be, the one that has waited the longest is dropped.

        One whose request is being answered, and which reads, is never dropped.
        """
        if connections < self.limits.connections:
            return True
        oldest = next(iter(self.waiting), None)
        if oldest is None:
            self.turned_away += 1
            return False
        self.dropped += 1
        oldest.drop()
        return True

    def wait(self, held: Connection) -> None:
        """It waits for its client from now on."""
        self.waiting.pop(held, None)
        self.waiting[held] = None

    def leave(self, held: Connection) -> None:
        """It waits for its client no more."""
        self.waiting.pop(held, None)


class Phase(Enum):
    """What a connection waits for."""

    IDLE = "a request"
    HEADERS = "the rest of its headers"
    BODY = "the rest of its body"
    ANSWERING = "us"
    LEFTOVER = "the rest of a request that was answered already"
    CLOSING = "its client to read what is left, before it is closed"


class Connection(H11Protocol):
    """A subclass of it, with a ``gate``, is what uvicorn is configured with."""

    gate: ClassVar[ConnectionGate]

    phase: Phase | None = None
    since = 0.0  # of the phase, by the gate's clock
    received = 0  # bytes, in this phase
    unread = 0  # bytes that wait for the client to take them, when this was last looked at
    taken_at = 0.0  # when there were fewer of them than before, or none
    full = False  # so many that no more is written
    turned_away = False
    refused = False  # in place of the application

    # What uvicorn and asyncio call.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if not self.gate.admits(len(self.connections)):
            self.turned_away, self.transport = True, transport
            transport.write(_response(503, self.gate.refusal(None, 503, "too many connections"), b"retry-after: 1\r\n"))
            transport.close()
            return
        super().connection_made(transport)
        self.mark()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.turned_away:
            self.gate.leave(self)
            super().connection_lost(exc)
            self._unset_keepalive_if_required()  # uvicorn keeps the timer, and all of this with it, after an error

    def data_received(self, data: bytes) -> None:
        if self.turned_away or self.refused or self.transport.is_closing():
            return
        self.received += len(data)
        super().data_received(data)
        self.mark()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.mark()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.full = True
        self.gate.wait(self)

    def resume_writing(self) -> None:
        super().resume_writing()
        self.full = False
        if self.phase is Phase.ANSWERING:
            self.gate.leave(self)

    def send_400_response(self, msg: str) -> None:
        # Called where h11 raised what says which status it is: 431 for headers that are too long.
        error = sys.exception()
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        self.refuse(status, f"not an HTTP request: {error}" if error is not None else msg)

    # What the server calls.

    def mark(self) -> None:
        """Note the phase that it is in now."""
        phase = self._phase()
        if phase is self.phase:
            return
        self.phase, self.since, self.received = phase, self.gate.clock(), 0
        if phase is not Phase.ANSWERING:
            self.gate.wait(self)
        elif not self.full:
            self.gate.leave(self)

    def look(self) -> None:
        """Close it if its client is late."""
        self.mark()  # uvicorn closes connections on its own, too
        limits, waited = self.gate.limits, self.gate.clock() - self.since
        if self._untaken_s() > limits.write_s:
            self.gate.late += 1
            self._cut()
            return
        match self.phase:
            case Phase.IDLE:
                if waited > limits.idle_s:
                    self.transport.close()
            case Phase.HEADERS:
                if waited > limits.header_s:
                    self._late(f"the headers did not end within {limits.header_s:g} s")
            case Phase.BODY:
                if waited > limits.body_s + self.received / limits.body_rate:
                    self._late("the body came too slowly")
            case Phase.LEFTOVER:
                if waited > limits.linger_s:
                    self._cut()

    def drop(self) -> None:
        """Close it at once, and count it no longer."""
        self.connections.discard(self)
        self.gate.leave(self)
        self._cut()

    def refuse(self, status: int, message: str) -> None:
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
        path = self.scope["path"] if self.scope is not None else None
        self.transport.write(_response(status, self.gate.refusal(path, status, message)))
        self.transport.write_eof()
        self.flow.resume_reading()
        self.mark()

    def _cut(self) -> None:
        """Close it at once. What the client has not taken is forgotten, by the system too, and it is told so."""
        if self.transport.get_write_buffer_size():
            forget = struct.pack("ii", 1, 0)
            self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, forget)
        self.transport.abort()

    def _late(self, message: str) -> None:
        self.gate.late += 1
        self.refuse(408, message)

    def _untaken_s(self) -> float:
        """Seconds in which the client has taken nothing of what there is to take."""
        now, unread = self.gate.clock(), self.transport.get_write_buffer_size()
        if not unread or not self.unread or unread < self.unread:
            self.taken_at = now
        self.unread = unread
        return now - self.taken_at

    def _phase(self) -> Phase:
        if self.transport.is_closing():
            return Phase.CLOSING
        if self.refused:
            return Phase.LEFTOVER
        match self.conn.their_state:
            case h11.IDLE:
                return Phase.HEADERS if self.conn.trailing_data[0] else Phase.IDLE
            case h11.SEND_BODY:
                return Phase.BODY if self.conn.our_state is h11.SEND_RESPONSE else Phase.LEFTOVER
        return Phase.ANSWERING


def _response(status: int, body: bytes, more: bytes = b"") -> bytes:
    """A whole answer, after which the connection is closed."""
    head = f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
    return head.encode() + more + b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(body), body)
