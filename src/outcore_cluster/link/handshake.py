"""Both ends of a new connection prove that they have the run's key.

    client → server   magic, protocol, 32 random bytes
    server → client   magic, protocol, 32 random bytes
    client → server   its facts, and an HMAC-SHA256 over both greetings and the facts
    server → client   why it refuses the client, or nothing, and such an HMAC

The client proves itself first, so a stranger learns only that Outcore listens. The HMACs of client and server cover
different words, so neither message can be sent back. The handshake keeps strangers out of a run. It neither encrypts
the connection nor detects changes on the way.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple

MAGIC = b"OUTCLINK"
PROTOCOL = 4
MOST_TEXT = 8192
_HELLO = struct.Struct("!8sH32s")
_LENGTH = struct.Struct("!H")


class HandshakeError(Exception):
    """The other side is no rank of this run; the message says why."""


class RefusedError(HandshakeError):
    """The other side has the key and refuses this rank."""


class Facts(NamedTuple):
    """A client's run and rank, and the rank that it expects at the other end (``to``)."""

    version: str
    run: str
    size: int
    rank: int
    to: int
    purpose: str


async def ask(sock: socket.socket, key: bytes, facts: Facts, within_s: float) -> None:
    """Runs the client's side. Raises ``RefusedError`` if the server has the key and refuses this rank,
    ``HandshakeError`` if it lacks the key, ``OSError`` if the connection broke or the handshake took longer than
    ``within_s``."""
    async with _greeted(sock, key, within_s, server=False) as (send, receive):
        await send(json.dumps(facts))
        reason = await receive()
    if reason:
        raise RefusedError(reason)


async def answer(sock: socket.socket, key: bytes, judge: Callable[[Facts], str], within_s: float) -> Facts:
    """Runs the server's side. Returns the facts of a client that has the key and is not refused. ``judge`` returns why
    one that has the key is refused, or an empty text. Raises as ``ask`` does."""
    async with _greeted(sock, key, within_s, server=True) as (send, receive):
        try:
            theirs = Facts(*json.loads(await receive()))
        except (ValueError, TypeError) as e:
            raise HandshakeError("what it says of itself cannot be read") from e
        reason = judge(theirs)
        await send(reason)
    if reason:
        raise HandshakeError(reason)
    return theirs


@asynccontextmanager
async def _greeted(
    sock: socket.socket, key: bytes, within_s: float, *, server: bool
) -> AsyncIterator[tuple[Callable[[str], Awaitable[None]], Callable[[], Awaitable[str]]]]:
    """Exchanges greetings. Yields how to send a text, and how to receive one, each with its HMAC."""
    loop, own = asyncio.get_running_loop(), _HELLO.pack(MAGIC, PROTOCOL, os.urandom(32))
    hung_up = "it hung up before it had said who it is" if server else "it hung up at once"

    async def read(count: int) -> bytes:
        data = b""
        while len(data) < count:
            if not (more := await loop.sock_recv(sock, count - len(data))):
                raise HandshakeError(hung_up)
            data += more
        return data

    def mac(text: bytes, *, of_server: bool) -> bytes:
        return hmac.digest(key, (b"server\n" if of_server else b"client\n") + text, "sha256")

    async def send(text: str) -> None:
        nonlocal hung_up
        data, hung_up = text.encode(), "it hung up: its key is another"
        await loop.sock_sendall(sock, _LENGTH.pack(len(data)) + data + mac(data, of_server=server))

    async def receive() -> str:
        (length,) = _LENGTH.unpack(await read(_LENGTH.size))
        if length > MOST_TEXT:
            raise HandshakeError(f"it says {length} bytes of itself")
        expected = mac(data := await read(length), of_server=not server)
        if not hmac.compare_digest(expected, await read(len(expected))):
            raise HandshakeError("its key is another")
        return data.decode()

    try:
        async with asyncio.timeout(within_s):
            if not server:
                await loop.sock_sendall(sock, own)
            magic, protocol, _ = _HELLO.unpack(other := await read(_HELLO.size))
            if magic != MAGIC:
                raise HandshakeError("it does not speak Outcore's link")
            if protocol != PROTOCOL:
                raise HandshakeError(f"it speaks version {protocol} of the link, this one {PROTOCOL}")
            if server:
                await loop.sock_sendall(sock, own)
            both = other + own if server else own + other
            key = hmac.digest(key, b"outcore link\n" + both, "sha256")  # of this connection alone
            yield send, receive
    except TimeoutError:
        raise TimeoutError("it took too long to say who it is") from None
