"""Who is at the other end of a connection: each side proves that it has the run's key, before anything is believed.

    client → server   magic, protocol, 32 random bytes
    server → client   magic, protocol, 32 random bytes
    client → server   facts, HMAC-SHA256 over what was said so far and the facts
    server → client   accepted or refused, facts, HMAC over all of that

The client proves itself first, so a stranger who connects learns nothing but that Outcore listens. A message has 8 kB
at most, and the whole may take ``Limits.handshake`` seconds, however slowly bytes drip. The words in front of each HMAC
differ, so that none can be sent back.

It keeps strangers out of a run. It does not hide what is sent and does not notice what somebody on the way changes
later: over a network that others use, put the link into WireGuard or an ssh tunnel.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields

MAGIC = b"OUTCLINK"
PROTOCOL = 1
RANDOM_BYTES = 32
MOST_FACTS = 8192
_HELLO = struct.Struct(f"!8sH{RANDOM_BYTES}s")
_LENGTH = struct.Struct("!?H")
_MAC_BYTES = hashlib.sha256().digest_size


class HandshakeError(Exception):
    """The other side is not who it should be; says why."""


class RefusedError(HandshakeError):
    """The other side has proven itself and will not have us."""


@dataclass(frozen=True)
class Facts:
    """What one side says of itself, and whom it takes the other for.

    Attributes:
        version: of Outcore.
        run: the run's name: two at the same time do not meet.
        rank: who says it. to: whom.
        purpose: ``control`` or ``data``.
    """

    version: str
    run: str
    size: int
    rank: int
    to: int
    purpose: str
    reason: str = ""


def ask(sock: socket.socket, key: bytes, mine: Facts, within_s: float) -> Facts:
    """The client's side; the server's facts.

    Raises:
        HandshakeError: it is no rank of this run. RefusedError: it is, and says why it refuses.
        OSError: the connection broke or took too long.
    """
    wire = _Wire(sock, within_s)
    said = _hello()
    wire.write(said)
    try:
        said += wire.read(_HELLO.size)
    except EOFError:
        raise HandshakeError("it hung up at once") from None
    _check_hello(said[_HELLO.size :])
    said += _with_mac(key, b"client", said, True, mine, wire)
    try:
        accepted, theirs = _proven(key, b"server", said, wire)
    except EOFError:
        raise HandshakeError("it hung up: its key is another") from None
    if not accepted:
        raise RefusedError(theirs.reason)
    if (theirs.run, theirs.size, theirs.rank, theirs.to) != (mine.run, mine.size, mine.to, mine.rank):
        raise HandshakeError(f"it is rank {theirs.rank} of {theirs.size} of run {theirs.run}")
    return theirs


def answer(sock: socket.socket, key: bytes, judge: Callable[[Facts], Facts], within_s: float) -> Facts:
    """The server's side; the client's facts, once it was told that it is welcome.

    Args:
        judge: what to say of ourselves to a client that has the key; with a ``reason`` it is refused.

    Raises:
        HandshakeError: it has not the key, or was refused.
        OSError: the connection broke or took too long.
    """
    wire = _Wire(sock, within_s)
    try:
        said = wire.read(_HELLO.size)
        _check_hello(said)
        mine = _hello()
        wire.write(mine)
        said += mine
        _, theirs = _proven(key, b"client", said, wire)
    except EOFError:
        raise HandshakeError("it hung up before it had said who it is") from None
    said += wire.last
    facts = judge(theirs)
    _with_mac(key, b"server", said, not facts.reason, facts, wire)
    if facts.reason:
        raise HandshakeError(facts.reason)
    return theirs


def _hello() -> bytes:
    return _HELLO.pack(MAGIC, PROTOCOL, os.urandom(RANDOM_BYTES))


def _check_hello(data: bytes) -> None:
    magic, protocol, _ = _HELLO.unpack(data)
    if magic != MAGIC:
        raise HandshakeError("it does not speak Outcore's link")
    if protocol != PROTOCOL:
        raise HandshakeError(f"it speaks version {protocol} of the link, this one {PROTOCOL}")


def _with_mac(key: bytes, role: bytes, said: bytes, accepted: bool, facts: Facts, wire: _Wire) -> bytes:
    text = json.dumps(asdict(facts)).encode()
    body = _LENGTH.pack(accepted, len(text)) + text
    message = body + _mac(key, role, said + body)
    wire.write(message)
    return message


def _proven(key: bytes, role: bytes, said: bytes, wire: _Wire) -> tuple[bool, Facts]:
    head = wire.read(_LENGTH.size)
    accepted, length = _LENGTH.unpack(head)
    if length > MOST_FACTS:
        raise HandshakeError(f"it says {length} bytes of itself")
    body = head + wire.read(length)
    mac = wire.read(_MAC_BYTES)
    wire.last = body + mac
    if not hmac.compare_digest(mac, _mac(key, role, said + body)):
        raise HandshakeError("its key is another")
    return accepted, _facts(body[_LENGTH.size :])


def _mac(key: bytes, role: bytes, said: bytes) -> bytes:
    return hmac.new(key, b"outcore link " + role + b"\n" + said, hashlib.sha256).digest()


def _facts(text: bytes) -> Facts:
    try:
        values = json.loads(text)
        found = Facts(**values)
        wrong = [f.name for f in fields(Facts) if type(getattr(found, f.name)).__name__ != f.type]
    except (ValueError, TypeError) as e:
        raise HandshakeError("what it says of itself cannot be read") from e
    if wrong:
        raise HandshakeError(f"what it says of itself cannot be read: {wrong[0]}")
    return found


class _Wire:
    """A socket until a deadline, and not beyond: nothing is read that belongs to what comes after."""

    def __init__(self, sock: socket.socket, within_s: float) -> None:
        self._sock, self._end = sock, time.monotonic() + within_s
        self.last = b""

    def _left(self) -> float:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError("it took too long to say who it is")
        return left

    def read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            self._sock.settimeout(self._left())
            more = self._sock.recv(count - len(data))
            if not more:
                raise EOFError
            data += more
        return data

    def write(self, data: bytes) -> None:
        self._sock.settimeout(self._left())
        self._sock.sendall(data)
