"""Connects all ranks of a run: each pair for messages, and rank 0 with each other rank for control frames.

The higher rank of a pair connects, and retries until the lower one listens. Others that connect meanwhile (a stranger,
a rank of another run, the same rank twice) are refused. Nothing listens once all ranks are connected. Both ends of a
connection prove that they have the run's key:

    client → server   magic, protocol, 32 random bytes
    server → client   magic, protocol, 32 random bytes
    client → server   its ``Facts``, and an HMAC-SHA256 over both greetings and the facts
    server → client   the reason why it refuses the client (empty: it does not), and an HMAC over both greetings and it

The client proves itself first, so a stranger learns only that Outcore listens. The HMACs of client and server cover
different words, so neither message can be sent back.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from outcore.errors import LinkError
from outcore.text import one_line

from ..link_protocol import LinkLimits

CONTROL, DATA = "control", "data"
RETRY_S = 0.05
# Most handshakes at the same time. One more cancels the oldest, so that silent strangers keep no rank out.
MOST_GREETED = 32
MAGIC = b"OUTCLINK"
PROTOCOL = 4
_HELLO = struct.Struct("!8sH32s")
_LENGTH = struct.Struct("!H")


class HandshakeError(Exception):
    """The other side is not a rank of this run; the message says why."""


class RefusedError(HandshakeError):
    """The other side has the key and refuses this rank."""


class Facts(NamedTuple):
    """A client's Outcore version, run, number of ranks in it, rank, expected rank at the other end, and purpose."""

    version: str
    run: str
    size: int
    rank: int
    to: int
    purpose: str


@dataclass(frozen=True)
class Identity:
    """This rank's number, and what all ranks of a run have in common: by rank, addresses (host, port) and names of
    hosts in messages; the run's name and secret key; Outcore's version."""

    rank: int
    addresses: Sequence[tuple[str, int]]
    names: Sequence[str]
    run: str
    key: bytes
    version: str

    def who(self, *ranks: int) -> str:
        return ", ".join(f"rank {rank} ({self.names[rank]})" for rank in ranks)


class Meeting:
    """Connects one rank with all others. ``there``: the connections, by the other rank's number and the purpose."""

    def __init__(
        self, me: Identity, limits: LinkLimits, listener: socket.socket | None, alone: Callable[[], str | None]
    ) -> None:
        self._me, self._limits, self._alone = me, limits, alone
        self.there: dict[tuple[int, str], socket.socket] = {}
        self._refused = ""
        self._end = time.monotonic() + limits.start
        higher, purposes = range(me.rank + 1, len(me.addresses)), (CONTROL, DATA)[bool(me.rank) :]
        self._wanted = {(peer, purpose) for peer in higher for purpose in purposes}
        self._listener = listener or listen(me.addresses[me.rank], me.who(me.rank))

    async def meet(self) -> None:
        """Connects this rank with all others. Raises ``LinkError`` if one is not there in time or refuses this rank."""
        accepting = asyncio.create_task(self._accept())
        try:
            for peer in range(self._me.rank):
                for purpose in (CONTROL, DATA) if peer == 0 else (DATA,):
                    await self._connect(peer, purpose)
            while (missing := self._wanted - self.there.keys()) and self._left_s() > 0:
                await asyncio.sleep(RETRY_S)
            if missing:
                why = f"; last refused: {self._refused}" if self._refused else ""
                raise self._absent({peer for peer, _ in missing}, why)
        finally:
            accepting.cancel()
            self._listener.close()

    async def _connect(self, peer: int, purpose: str) -> None:
        me, why = self._me, ""
        while (left := self._left_s()) > 0:
            within_s = min(left, self._limits.handshake)
            facts = Facts(me.version, me.run, len(me.addresses), me.rank, peer, purpose)
            try:
                with await asyncio.to_thread(socket.create_connection, me.addresses[peer], within_s) as sock:
                    sock.setblocking(False)
                    await handshake(sock, me.key, facts, within_s)
                    self.there[peer, purpose] = socket.socket(fileno=sock.detach())
                    return
            except RefusedError as e:
                raise LinkError(f"{me.who(peer)} refuses {me.who(me.rank)}: {e}", peer) from None
            except HandshakeError as e:
                why = f": {one_line(e)}"
            except OSError as e:
                # The error of an earlier handshake says more.
                why = why or f": {e.strerror or one_line(e)}" if left < 2 * RETRY_S else why
            await asyncio.sleep(min(RETRY_S, left))
        raise self._absent({peer}, why)

    def _left_s(self) -> float:
        if (reason := self._alone()) is not None:
            raise LinkError(f"{self._me.who(self._me.rank)}: {reason}", self._me.rank)
        return self._end - time.monotonic()

    def _absent(self, ranks: set[int], why: str) -> LinkError:
        missing = f"{self._me.who(*sorted(ranks))} did not come within {self._limits.start:.3g} s of the start"
        return LinkError(missing + why, min(ranks))

    async def _accept(self) -> None:
        greeting = deque[asyncio.Task[None]](maxlen=MOST_GREETED)  # oldest first
        self._listener.setblocking(False)
        while True:
            try:
                sock, address = await asyncio.get_running_loop().sock_accept(self._listener)
            except OSError:
                await asyncio.sleep(RETRY_S)  # no free descriptor, or the connection broke at once
                continue
            if len(greeting) == MOST_GREETED:
                greeting[0].cancel()
            greeting.append(asyncio.create_task(self._greet(sock, str(address[0]))))
            await asyncio.sleep(0)  # lets the task begin, so that it closes the socket even if it is cancelled

    async def _greet(self, sock: socket.socket, address: str) -> None:
        with sock:
            try:
                theirs = await handshake(sock, self._me.key, self._judge, self._limits.handshake)
                if self._vacant(theirs):
                    self.there[theirs.rank, theirs.purpose] = socket.socket(fileno=sock.detach())
            except (OSError, HandshakeError) as e:
                self._refused = f"{address}: {one_line(e)}"

    def _judge(self, theirs: Facts) -> str:
        """Returns the reason to refuse a client that has the key; empty: it is accepted."""
        me = self._me
        if theirs.version != me.version:
            return f"Outcore {theirs.version} there, {me.version} here: install the same version on all hosts"
        same = (theirs.run, theirs.size, theirs.to) == (me.run, len(me.addresses), me.rank)
        if not same or (theirs.rank, theirs.purpose) not in self._wanted:
            return (
                f"it is of another run, or rank {theirs.rank} of {theirs.size} at rank {me.rank}, its rank {theirs.to}"
            )
        return "" if self._vacant(theirs) else f"there is a rank {theirs.rank} already"

    def _vacant(self, theirs: Facts) -> bool:
        """Whether this rank has no such connection yet, or the other end of that connection has hung up."""
        sock = self.there.get((theirs.rank, theirs.purpose))
        try:
            return sock is None or not sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True


def listen(address: tuple[str, int], who: str) -> socket.socket:
    """Returns a listening socket. Raises ``LinkError`` if this machine has no such address or the port is in use."""
    try:
        family, _, _, _, place = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
        return socket.create_server(place[:2], family=family, backlog=MOST_GREETED)
    except OSError as e:
        raise LinkError(f"{who} cannot listen at {address[0]}:{address[1]}: {e.strerror or one_line(e)}") from e


async def handshake(sock: socket.socket, key: bytes, role: Facts | Callable[[Facts], str], within_s: float) -> Facts:
    """Runs one side of the handshake and returns the client's facts. ``role``: a client's facts; on the server a
    function that returns why it refuses a client that has the key, or an empty text.

    Raises:
        RefusedError: the server has the key and refuses this client.
        HandshakeError: the other side lacks the key, or this server refuses it.
        OSError: the connection broke, or the handshake took longer than ``within_s``.
    """
    loop, own, server = asyncio.get_running_loop(), _HELLO.pack(MAGIC, PROTOCOL, os.urandom(32)), callable(role)
    # A client's error of a key is worth more than that a later connection broke: not a HandshakeError.
    broken = HandshakeError if server else ConnectionError
    hung_up = "it hung up before it had proven who it is" if server else "it hung up at once"

    async def read(count: int) -> bytes:
        data = b""
        while len(data) < count:
            if not (more := await loop.sock_recv(sock, count - len(data))):
                raise broken(hung_up)
            data += more
        return data

    def mac(text: bytes, *, of_server: bool) -> bytes:
        return hmac.digest(both, (b"server\n" if of_server else b"client\n") + text, "sha256")

    async def send(text: str) -> None:
        nonlocal broken, hung_up
        broken, hung_up = HandshakeError, "it hung up: it has another key"
        data = text.encode()
        await loop.sock_sendall(sock, _LENGTH.pack(len(data)) + data + mac(data, of_server=server))

    async def receive() -> str:
        (length,) = _LENGTH.unpack(await read(_LENGTH.size))
        expected = mac(data := await read(length), of_server=not server)
        if not hmac.compare_digest(expected, await read(len(expected))):
            raise HandshakeError("it has another key")
        return data.decode()

    try:
        async with asyncio.timeout(within_s):
            if not server:
                await loop.sock_sendall(sock, own)
            magic, protocol, _ = _HELLO.unpack(other := await read(_HELLO.size))
            if magic != MAGIC:
                raise HandshakeError("it is not a rank of Outcore")
            if protocol != PROTOCOL:
                raise HandshakeError(f"its Outcore has link version {protocol}, this one {PROTOCOL}: update one")
            if server:
                await loop.sock_sendall(sock, own)
            # A key for this connection only.
            both = hmac.digest(key, b"outcore link\n" + (other + own if server else own + other), "sha256")
            if isinstance(role, Facts):
                await send(json.dumps(role))
                if reason := await receive():
                    raise RefusedError(reason)
                return role
            theirs = Facts(*json.loads(await receive()))
            await send(reason := role(theirs))
            if reason:
                raise HandshakeError(reason)
            return theirs
    except TimeoutError:
        raise TimeoutError("it did not prove in time who it is") from None
