"""How the ranks of a run find each other: every pair has a connection for data, rank 0 one with each for signs of life.

The higher rank of a pair connects, again and again until the lower one listens. Whoever else connects meanwhile (a
stranger, a rank of another run, the same rank twice) is refused and changes nothing. When all are there nobody listens
any more.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from outcore.errors import LinkError
from outcore.text import one_line

from ..link_protocol import LinkLimits
from .handshake import Facts, HandshakeError, RefusedError, answer, ask

CONTROL, DATA = "control", "data"
RETRY_S = 0.1
POLL_S = 0.02
MOST_GREETED = 32
"""Connections that may be proving who they are at the same time; the one that has taken longest makes room for another:
strangers who say nothing keep nobody out."""


@dataclass(frozen=True)
class Identity:
    """What all ranks of a run have in common, and this one's number.

    Attributes:
        addresses: host and port of each rank, by rank. ``names``: what users call the hosts.
        run: the run's name. ``key``: what its ranks prove themselves with. ``version``: of Outcore.
    """

    rank: int
    addresses: Sequence[tuple[str, int]]
    names: Sequence[str]
    run: str
    key: bytes
    version: str

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.addresses)

    def who(self, *ranks: int) -> str:
        """Ranks as errors name them."""
        return ", ".join(f"rank {rank} ({self.names[rank]})" for rank in ranks)

    def facts(self, to: int, purpose: str) -> Facts:
        """What this rank says of itself to another."""
        return Facts(self.version, self.run, self.size, self.rank, to, purpose)


class Meeting:
    """One rank's start-up.

    Args:
        listener: what others connect to; closed at the end. None: it is made.
        alone: a reason to end, such as a launcher that is gone.

    Attributes:
        there: connections so far, by rank at the other end and purpose.
    """

    def __init__(
        self, me: Identity, limits: LinkLimits, listener: socket.socket | None, alone: Callable[[], str | None]
    ) -> None:
        self._me, self._limits, self._alone = me, limits, alone
        self.there: dict[tuple[int, str], socket.socket] = {}
        self._refused = ""
        self._end = time.monotonic() + limits.start
        self._listener = listener or listen(me.addresses[me.rank], me.who(me.rank))

    async def meet(self) -> dict[tuple[int, str], socket.socket]:
        """The connections to all other ranks.

        Raises:
            LinkError: somebody did not come in time; says who. What was connected by then is in ``there``.
        """
        accepting = asyncio.create_task(self._accept())
        try:
            for peer in range(self._me.rank):
                for purpose in (CONTROL, DATA) if peer == 0 else (DATA,):
                    self.there[peer, purpose] = await self._connected(peer, purpose)
            await self._await_others()
        finally:
            accepting.cancel()
            self._listener.close()
        return self.there

    async def _connected(self, peer: int, purpose: str) -> socket.socket:
        """The higher rank's side."""
        me, why = self._me, ""
        while (left := self._end - time.monotonic()) > 0:
            self._check()
            try:
                return await self._asked(peer, purpose, min(left, self._limits.handshake))
            except RefusedError as e:
                raise LinkError(f"{me.who(peer)} refuses {me.who(me.rank)}: {e}", peer) from None
            except HandshakeError as e:
                why = f": {one_line(e)}"
            except OSError as e:
                # Whoever could be talked to has told more.
                why = why or f": {e.strerror or one_line(e)}" if left < 2 * RETRY_S else why
            await asyncio.sleep(min(RETRY_S, left))
        raise LinkError(self._absent([peer]) + why, peer)

    async def _asked(self, peer: int, purpose: str, within_s: float) -> socket.socket:
        sock = await asyncio.to_thread(socket.create_connection, self._me.addresses[peer], within_s)
        sock.setblocking(False)
        try:
            await ask(sock, self._me.key, self._me.facts(peer, purpose), within_s)
        except BaseException:
            sock.close()
            raise
        return sock

    async def _await_others(self) -> None:
        """The lower rank's side."""
        me = self._me
        wanted = {(peer, p) for peer in range(me.rank + 1, me.size) for p in (CONTROL, DATA)[bool(me.rank) :]}
        while (missing := wanted - self.there.keys()) and time.monotonic() < self._end:
            self._check()
            await asyncio.sleep(POLL_S)
        if not missing:
            return
        ranks = sorted({peer for peer, _ in missing})
        if not self._refused and len(ranks) == me.size - 1 and len({me.names[rank] for rank in ranks}) > 1:
            # Rather this one is cut off than all of several hosts.
            within = f"within {self._limits.start:.3g} s of the start"
            raise LinkError(f"{me.who(me.rank)}: has met nobody {within}; {me.who(*ranks)} should be there", me.rank)
        last = f"; last refused: {self._refused}" if self._refused else ""
        raise LinkError(self._absent(ranks) + last, ranks[0])

    def _check(self) -> None:
        if (reason := self._alone()) is not None:
            raise LinkError(f"{self._me.who(self._me.rank)}: {reason}", self._me.rank)

    def _absent(self, ranks: list[int]) -> str:
        return f"{self._me.who(*ranks)} did not come within {self._limits.start:.3g} s of the start"

    async def _accept(self) -> None:
        greeting: list[asyncio.Task[None]] = []  # who came first is first
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
            greeting[-1].add_done_callback(partial(self._greeted, sock))

    async def _greet(self, sock: socket.socket, address: str) -> None:
        try:
            theirs = await answer(sock, self._me.key, self._judged, self._limits.handshake)
            if self._vacant(theirs):
                self.there[theirs.rank, theirs.purpose] = sock
        except (OSError, HandshakeError) as e:
            self._refused = f"{address}: {one_line(e)}"

    def _greeted(self, sock: socket.socket, _: object) -> None:
        if sock not in self.there.values():
            sock.close()

    def _judged(self, theirs: Facts) -> Facts:
        """What to answer to one who has the key."""
        me, reason = self._me, ""
        if theirs.run != me.run:
            reason = "another run"
        elif theirs.version != me.version:
            reason = f"Outcore {theirs.version} there, {me.version} here: install the same version on all hosts"
        elif (theirs.size, theirs.to) != (me.size, me.rank) or theirs.rank not in range(me.rank + 1, me.size):
            reason = f"rank {theirs.rank} of {theirs.size} for rank {theirs.to}, at rank {me.rank} of {me.size}"
        elif theirs.purpose not in (CONTROL, DATA):
            reason = "no such purpose"
        elif not self._vacant(theirs):
            reason = f"there is a rank {theirs.rank} already"
        return replace(me.facts(theirs.rank, theirs.purpose), reason=reason)

    def _vacant(self, theirs: Facts) -> bool:
        """Whether nobody has this place, or who had it has hung up."""
        sock = self.there.get((theirs.rank, theirs.purpose))
        try:
            return sock is None or not sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True


def listen(address: tuple[str, int], who: str) -> socket.socket:
    """A listening socket.

    Raises:
        LinkError: the address is not this machine's, or in use.
    """
    try:
        family, _, _, _, place = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
        return socket.create_server(place[:2], family=family, backlog=MOST_GREETED)
    except OSError as e:
        raise LinkError(f"{who} cannot listen at {address[0]}:{address[1]}: {e.strerror or one_line(e)}") from e
