"""Who is at the other end of a connection: each side proves that it has the run's key, before anything is believed.

    client → server   magic, protocol, 32 random bytes
    server → client   magic, protocol, 32 random bytes
    client → server   facts, and an HMAC-SHA256 over both greetings and them
    server → client   its own, with a reason where it refuses

The client proves itself first, so a stranger who connects learns nothing but that Outcore listens. A message has 8 kB
at most, and the whole may take ``LinkLimits.handshake`` seconds, however slowly bytes drip. The words in front of each
HMAC differ, so that none can be sent back.

It keeps strangers out of a run. It does not hide what is sent and does not notice what somebody on the way changes
later.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import socket
import struct
from collections.abc import Callable
from dataclasses import asdict, dataclass

MAGIC = b"OUTCLINK"
PROTOCOL = 3
MOST_FACTS = 8192
SLOW = "it took too long to say who it is"
_HELLO = struct.Struct("!8sH32s")
_LENGTH = struct.Struct("!H")
_CLIENT, _SERVER = b"client\n", b"server\n"


class HandshakeError(Exception):
    """The other side is not who it should be; says why."""


class RefusedError(HandshakeError):
    """The other side has proven itself and will not have us."""


@dataclass(frozen=True)
class Facts:
    """What one side says of itself, and whom it takes the other for.

    Attributes:
        version: of Outcore. ``run``: the run's name: two at the same time do not meet.
        rank: who says it. ``to``: whom. ``purpose``: ``control`` or ``data``.
        reason: why the other is refused; empty: it is welcome.
    """

    version: str
    run: str
    size: int
    rank: int
    to: int
    purpose: str
    reason: str = ""


async def ask(sock: socket.socket, key: bytes, mine: Facts, within_s: float) -> Facts:
    """The client's side; the server's facts.

    Raises:
        HandshakeError: it is no rank of this run. RefusedError: it is, and says why it refuses.
        OSError: the connection broke, or it took too long.
    """
    hung_up = "it hung up at once"
    try:
        async with asyncio.timeout(within_s):
            key = await _greeted(sock, key, _CLIENT)
            hung_up = "it hung up: its key is another"
            await _prove(sock, key, _CLIENT, mine)
            theirs = await _proven(sock, key, _SERVER)
    except EOFError:
        raise HandshakeError(hung_up) from None
    except TimeoutError:
        raise TimeoutError(SLOW) from None
    if theirs.reason:
        raise RefusedError(theirs.reason)
    if (theirs.run, theirs.size, theirs.rank, theirs.to) != (mine.run, mine.size, mine.to, mine.rank):
        raise HandshakeError(f"it is rank {theirs.rank} of {theirs.size} of run {theirs.run}")
    return theirs


async def answer(sock: socket.socket, key: bytes, judge: Callable[[Facts], Facts], within_s: float) -> Facts:
    """The server's side; the client's facts, once it was told that it is welcome.

    Args:
        judge: what to say of ourselves to a client that has the key; with a ``reason`` it is refused.

    Raises:
        HandshakeError: it has not the key, or was refused. OSError: the connection broke, or it took too long.
    """
    try:
        async with asyncio.timeout(within_s):
            key = await _greeted(sock, key, _SERVER)
            theirs = await _proven(sock, key, _CLIENT)
            mine = judge(theirs)
            await _prove(sock, key, _SERVER, mine)
    except EOFError:
        raise HandshakeError("it hung up before it had said who it is") from None
    except TimeoutError:
        raise TimeoutError(SLOW) from None
    if mine.reason:
        raise HandshakeError(mine.reason)
    return theirs


async def _greeted(sock: socket.socket, key: bytes, role: bytes) -> bytes:
    """A key for this connection alone, made with both sides' random bytes."""
    mine = _HELLO.pack(MAGIC, PROTOCOL, os.urandom(32))
    if role == _CLIENT:
        await asyncio.get_running_loop().sock_sendall(sock, mine)
    theirs = await _exactly(sock, _HELLO.size)
    magic, protocol, _ = _HELLO.unpack(theirs)
    if magic != MAGIC:
        raise HandshakeError("it does not speak Outcore's link")
    if protocol != PROTOCOL:
        raise HandshakeError(f"it speaks version {protocol} of the link, this one {PROTOCOL}")
    if role == _SERVER:
        await asyncio.get_running_loop().sock_sendall(sock, mine)
    both = mine + theirs if role == _CLIENT else theirs + mine
    return hmac.digest(key, b"outcore link\n" + both, "sha256")


async def _prove(sock: socket.socket, key: bytes, role: bytes, facts: Facts) -> None:
    text = json.dumps(asdict(facts)).encode()
    said = _LENGTH.pack(len(text)) + text + hmac.digest(key, role + text, "sha256")
    await asyncio.get_running_loop().sock_sendall(sock, said)


async def _proven(sock: socket.socket, key: bytes, role: bytes) -> Facts:
    (length,) = _LENGTH.unpack(await _exactly(sock, _LENGTH.size))
    if length > MOST_FACTS:
        raise HandshakeError(f"it says {length} bytes of itself")
    text = await _exactly(sock, length)
    mac = hmac.digest(key, role + text, "sha256")
    if not hmac.compare_digest(mac, await _exactly(sock, len(mac))):
        raise HandshakeError("its key is another")
    try:
        return Facts(**json.loads(text))
    except (ValueError, TypeError) as e:
        raise HandshakeError("what it says of itself cannot be read") from e


async def _exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = await asyncio.get_running_loop().sock_recv(sock, count - len(data))
        if not more:
            raise EOFError
        data += more
    return data
