"""Who is at the other end of a connection: each side proves that it has the run's key, before anything is believed.

    client → server   magic, protocol, 32 random bytes
    server → client   magic, protocol, 32 random bytes
    client → server   facts, HMAC-SHA256 over what was said so far and the facts
    server → client   accepted or refused, facts, HMAC over all of that

The client proves itself first, so a stranger who connects learns nothing but that Outcore listens. A message has 8 kB
at most, and the whole may take ``LinkLimits.handshake`` seconds, however slowly bytes drip. The words in front of each
HMAC differ, so that none can be sent back.

It keeps strangers out of a run. It does not hide what is sent and does not notice what somebody on the way changes
later.
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
PROTOCOL = 2
MOST_FACTS = 8192
_HELLO = struct.Struct("!8sH32s")
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
        version: of Outcore. ``run``: the run's name: two at the same time do not meet.
        rank: who says it. ``to``: whom. ``purpose``: ``control`` or ``data``.
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
    talk = _Talk(sock, key, within_s)
    talk.greet()
    talk.hear_greeting("it hung up at once")
    talk.prove(b"client", True, mine)
    accepted, theirs = talk.proven(b"server", "it hung up: its key is another")
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
    talk, silent = _Talk(sock, key, within_s), "it hung up before it had said who it is"
    talk.hear_greeting(silent)
    talk.greet()
    _, theirs = talk.proven(b"client", silent)
    facts = judge(theirs)
    talk.prove(b"server", not facts.reason, facts)
    if facts.reason:
        raise HandshakeError(facts.reason)
    return theirs


class _Talk:
    """What both sides have said on a socket so far, until a deadline; nothing is read that belongs to what follows."""

    def __init__(self, sock: socket.socket, key: bytes, within_s: float) -> None:
        self._sock, self._key, self._end = sock, key, time.monotonic() + within_s
        self._said = b""

    def greet(self) -> None:
        self._write(_HELLO.pack(MAGIC, PROTOCOL, os.urandom(32)))

    def hear_greeting(self, hung_up: str) -> None:
        magic, protocol, _ = _HELLO.unpack(self._read(_HELLO.size, hung_up))
        if magic != MAGIC:
            raise HandshakeError("it does not speak Outcore's link")
        if protocol != PROTOCOL:
            raise HandshakeError(f"it speaks version {protocol} of the link, this one {PROTOCOL}")

    def prove(self, role: bytes, accepted: bool, facts: Facts) -> None:
        text = json.dumps(asdict(facts)).encode()
        body = _LENGTH.pack(accepted, len(text)) + text
        self._write(body + self._mac(role, self._said + body))

    def proven(self, role: bytes, hung_up: str) -> tuple[bool, Facts]:
        accepted, length = _LENGTH.unpack(self._read(_LENGTH.size, hung_up))
        if length > MOST_FACTS:
            raise HandshakeError(f"it says {length} bytes of itself")
        text = self._read(length, hung_up)
        mac = self._mac(role, self._said)
        if not hmac.compare_digest(mac, self._read(_MAC_BYTES, hung_up)):
            raise HandshakeError("its key is another")
        try:
            found = Facts(**json.loads(text))
            wrong = [f.name for f in fields(Facts) if type(getattr(found, f.name)).__name__ != f.type]
        except (ValueError, TypeError) as e:
            raise HandshakeError("what it says of itself cannot be read") from e
        if wrong:
            raise HandshakeError(f"what it says of itself cannot be read: {wrong[0]}")
        return accepted, found

    def _mac(self, role: bytes, said: bytes) -> bytes:
        return hmac.new(self._key, b"outcore link " + role + b"\n" + said, hashlib.sha256).digest()

    def _left(self) -> float:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError("it took too long to say who it is")
        return left

    def _read(self, count: int, hung_up: str) -> bytes:
        data = b""
        while len(data) < count:
            self._sock.settimeout(self._left())
            more = self._sock.recv(count - len(data))
            if not more:
                raise HandshakeError(hung_up)
            data += more
        self._said += data
        return data

    def _write(self, data: bytes) -> None:
        self._sock.settimeout(self._left())
        self._sock.sendall(data)
        self._said += data
