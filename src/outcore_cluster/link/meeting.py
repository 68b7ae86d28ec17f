"""Connects all ranks of a run: each pair for messages, and rank 0 with each other rank for control frames.

The higher rank of a pair connects, and retries until the lower one listens. Others that connect meanwhile (a stranger,
a rank of another run, the same rank twice) are refused. Nothing listens once all ranks are connected.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outcore.errors import LinkError
from outcore.text import one_line

from ..link_protocol import LinkLimits
from .handshake import Facts, HandshakeError, RefusedError, answer, ask

CONTROL, DATA = "control", "data"
RETRY_S = 0.1
POLL_S = 0.02
MOST_GREETED = 32
"""Handshakes at the same time. The oldest makes room for the next, so that silent strangers keep no rank out."""


@dataclass(frozen=True)
class Identity:
    """This rank's number, and what all ranks of a run have in common: by rank, addresses (host, port) and hosts as
    users call them; the run's name and secret key; Outcore's version."""

    rank: int
    addresses: Sequence[tuple[str, int]]
    names: Sequence[str]
    run: str
    key: bytes
    version: str

    @property
    def size(self) -> int:
        return len(self.addresses)

    def who(self, *ranks: int) -> str:
        """Returns ranks as errors name them."""
        return ", ".join(f"rank {rank} ({self.names[rank]})" for rank in ranks)

    def facts(self, to: int, purpose: str) -> Facts:
        return Facts(self.version, self.run, self.size, self.rank, to, purpose)


class Meeting:
    """One rank's start-up. ``there`` holds the connections so far, by the rank at the other end and the purpose."""

    def __init__(
        self, me: Identity, limits: LinkLimits, listener: socket.socket | None, alone: Callable[[], str | None]
    ) -> None:
        self._me, self._limits, self._alone = me, limits, alone
        self.there: dict[tuple[int, str], socket.socket] = {}
        self._refused = ""
        self._end = time.monotonic() + limits.start
        self._listener = listener or listen(me.addresses[me.rank], me.who(me.rank))

    async def meet(self) -> None:
        """Connects this rank with all others. Raises ``LinkError`` if one does not come in time or refuses this one."""
        accepting = asyncio.create_task(self._accept())
        try:
            for peer in range(self._me.rank):
                for purpose in (CONTROL, DATA) if peer == 0 else (DATA,):
                    await self._connect(peer, purpose)
            await self._await_higher()
        finally:
            accepting.cancel()
            self._listener.close()

    async def _connect(self, peer: int, purpose: str) -> None:
        me, why = self._me, ""
        while (left := self._left_s()) > 0:
            sock, within_s = None, min(left, self._limits.handshake)
            try:
                sock = await asyncio.to_thread(socket.create_connection, me.addresses[peer], within_s)
                sock.setblocking(False)
                await ask(sock, me.key, me.facts(peer, purpose), within_s)
                self.there[peer, purpose] = sock
                return
            except RefusedError as e:
                raise LinkError(f"{me.who(peer)} refuses {me.who(me.rank)}: {e}", peer) from None
            except HandshakeError as e:
                why = f": {one_line(e)}"
            except OSError as e:
                # A handshake that failed says more.
                why = why or f": {e.strerror or one_line(e)}" if left < 2 * RETRY_S else why
            finally:
                if sock is not None and sock not in self.there.values():
                    sock.close()
            await asyncio.sleep(min(RETRY_S, left))
        raise self._absent([peer], why)

    async def _await_higher(self) -> None:
        me = self._me
        wanted = {(peer, p) for peer in range(me.rank + 1, me.size) for p in (CONTROL, DATA)[bool(me.rank) :]}
        while (missing := wanted - self.there.keys()) and self._left_s() > 0:
            await asyncio.sleep(POLL_S)
        ranks = sorted({peer for peer, _ in missing})
        if not self._refused and len(ranks) == me.size - 1 and len({me.names[rank] for rank in ranks}) > 1:
            # This host is cut off more probably than all of several others.
            within = f"within {self._limits.start:.3g} s of the start"
            raise LinkError(f"{me.who(me.rank)}: has met nobody {within}; {me.who(*ranks)} should be there", me.rank)
        if ranks:
            raise self._absent(ranks, f"; last refused: {self._refused}" if self._refused else "")

    def _left_s(self) -> float:
        if (reason := self._alone()) is not None:
            raise LinkError(f"{self._me.who(self._me.rank)}: {reason}", self._me.rank)
        return self._end - time.monotonic()

    def _absent(self, ranks: list[int], why: str) -> LinkError:
        missing = f"{self._me.who(*ranks)} did not come within {self._limits.start:.3g} s of the start"
        return LinkError(missing + why, ranks[0])

    async def _accept(self) -> None:
        greeting: list[asyncio.Task[None]] = []  # oldest first
        self._listener.setblocking(False)
        while True:
            try:
                sock, address = await asyncio.get_running_loop().sock_accept(self._listener)
            except OSError:
                await asyncio.sleep(RETRY_S)  # no descriptors left, or a connection that broke at once
                continue
            greeting = [each for each in greeting if not each.done()]
            if len(greeting) == MOST_GREETED:
                greeting.pop(0).cancel()
            greeting.append(asyncio.create_task(self._greet(sock, str(address[0]))))
            await asyncio.sleep(0)  # until the task has begun, so that it closes the socket whatever happens

    async def _greet(self, sock: socket.socket, address: str) -> None:
        try:
            theirs = await answer(sock, self._me.key, self._judge, self._limits.handshake)
            if self._vacant(theirs):
                self.there[theirs.rank, theirs.purpose] = sock
        except (OSError, HandshakeError) as e:
            self._refused = f"{address}: {one_line(e)}"
        finally:
            if sock not in self.there.values():
                sock.close()

    def _judge(self, theirs: Facts) -> str:
        """Returns why a client that has the key is refused; empty: it is not."""
        me = self._me
        if theirs.run != me.run:
            return "another run"
        if theirs.version != me.version:
            return f"Outcore {theirs.version} there, {me.version} here: install the same version on all hosts"
        if (theirs.size, theirs.to) != (me.size, me.rank) or theirs.rank not in range(me.rank + 1, me.size):
            return f"rank {theirs.rank} of {theirs.size} for rank {theirs.to}, at rank {me.rank} of {me.size}"
        if theirs.purpose not in (CONTROL, DATA):
            return "no such purpose"
        return "" if self._vacant(theirs) else f"there is a rank {theirs.rank} already"

    def _vacant(self, theirs: Facts) -> bool:
        """Whether this place is free, or the rank that had it has hung up."""
        sock = self.there.get((theirs.rank, theirs.purpose))
        try:
            return sock is None or not sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True


def listen(address: tuple[str, int], who: str) -> socket.socket:
    """Returns a listening socket. Raises ``LinkError`` if the address is not this machine's, or in use."""
    try:
        family, _, _, _, place = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
        return socket.create_server(place[:2], family=family, backlog=MOST_GREETED)
    except OSError as e:
        raise LinkError(f"{who} cannot listen at {address[0]}:{address[1]}: {e.strerror or one_line(e)}") from e
