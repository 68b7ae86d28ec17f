"""How long, how large and how many: what a client may take of the server, and who has to go when there is no room.

uvicorn's own limits are a time-out between requests, a size of headers, and 503 beyond a number of connections, which
whoever holds them then keeps. It waits for ever for the rest of headers or of a body, and for a client to read
(``uvicorn/protocols/http/h11_impl.py``: the one timer is ``timeout_keep_alive_task``).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


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
        header_bytes, body_bytes: of one request. A prompt of a million tokens has 4 MB or so. pydantic reads JSON at
            50 MB a second or more, in which nobody else is heard.
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
    body_bytes: int = 4_000_000

    @property
    def all_bodies_bytes(self) -> int:
        """Of all requests that are being read, or wait for their answers."""
        return 4 * self.body_bytes

    @property
    def values(self) -> int:
        """Of a body's JSON, told by commas and brackets: each costs 60 bytes or more, of 2 bytes of the body."""
        return max(250_000, self.body_bytes // 8)


class HeldConnection(Protocol):
    """What the gate knows of a connection."""

    def drop(self) -> None:
        """Close it at once, whatever it is doing."""
        ...


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
        self.waiting: dict[HeldConnection, None] = {}
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

    def wait(self, held: HeldConnection) -> None:
        """It waits for its client from now on."""
        self.waiting.pop(held, None)
        self.waiting[held] = None

    def leave(self, held: HeldConnection) -> None:
        """It waits for its client no more."""
        self.waiting.pop(held, None)
