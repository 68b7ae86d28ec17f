"""How long, how large and how many: what a client may take of the server, and who has to go when there is no room.

uvicorn's own limits are a time-out between requests, a size of headers, and 503 beyond a number of connections, which
whoever holds them then keeps. It waits for ever for the rest of headers or of a body, and for a client to read
(``uvicorn/protocols/http/h11_impl.py``: the one timer is ``timeout_keep_alive_task``).
"""

from __future__ import annotations

from dataclasses import dataclass


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
            escaped. ``all_bodies_bytes``: of all that are read, or wait for their answers.
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

    @property
    def all_bodies_bytes(self) -> int:
        """Of all requests together."""
        return 4 * self.body_bytes
