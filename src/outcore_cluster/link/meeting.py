"""How the ranks of a run find each other: every pair has two connections, one for data and one for signs of life.

The higher rank of a pair connects, again and again until the lower one listens. Whoever else connects meanwhile (a
stranger, a rank of another run, the same rank twice) is refused and changes nothing. When all are there nobody listens
any more.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from outcore.errors import LinkError
from outcore.text import one_line

from .handshake import Facts, HandshakeError, RefusedError, answer, ask
from .limits import LinkLimits

CONTROL, DATA = "control", "data"
RETRY_S = 0.1
CHECK_S = 0.5
MOST_GREETED = 32
"""Connections that may be proving who they are at the same time; the one that has taken longest makes room for another:
strangers who say nothing keep nobody out."""


@dataclass(frozen=True)
class Identity:
    """What all ranks of a run have in common, and this one's number.

    Attributes:
        addresses: host and port of each rank, by rank.
        names: what users call the hosts.
        run: the run's name. key: what its ranks prove themselves with.
        version: of Outcore.
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

    def who(self, rank: int) -> str:
        """A rank as errors name it."""
        return f"rank {rank} ({self.names[rank]})"

    def facts(self, to: int, purpose: str) -> Facts:
        """What this rank says of itself to another."""
        return Facts(self.version, self.run, self.size, self.rank, to, purpose)


Connections = dict[tuple[int, str], socket.socket]
"""By rank at the other end and purpose."""


class Meeting:
    """One rank's start-up.

    Args:
        listener: what others connect to; closed at the end. None: it is made.
        alone: a reason to end, such as a launcher that is gone; asked about twice a second.
    """

    def __init__(
        self,
        me: Identity,
        limits: LinkLimits,
        listener: socket.socket | None = None,
        alone: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._me, self._limits, self._alone = me, limits, alone
        self._changed = threading.Condition()
        self._there: Connections = {}
        self._over = False
        self._refused = ""
        self._greeting: list[socket.socket] = []  # who came first is first
        self._end = time.monotonic() + limits.start
        self._listener = listener or listen(me.addresses[me.rank], me.who(me.rank))

    def meet(self) -> Connections:
        """The connections to all other ranks.

        Raises:
            LinkError: somebody did not come in time; says who. What was connected by then is in ``there``.
        """
        accepting = threading.Thread(target=self._accept, name="outcore-link-accept", daemon=True)
        accepting.start()
        try:
            for peer in range(self._me.rank):
                for purpose in (CONTROL, DATA):
                    self._keep(peer, purpose, self._connect(peer, purpose))
            self._await_others()
        finally:
            with self._changed:
                self._over = True
            accepting.join()
            self._listener.close()
        return self._there

    @property
    def there(self) -> Connections:
        """Those that are connected so far."""
        with self._changed:
            return dict(self._there)

    def _keep(self, peer: int, purpose: str, sock: socket.socket) -> None:
        with self._changed:
            self._there[peer, purpose] = sock
            self._changed.notify_all()

    # The higher rank's side.

    def _connect(self, peer: int, purpose: str) -> socket.socket:
        why = ""
        while (left := self._end - time.monotonic()) > 0:
            self._check()
            try:
                return self._connected(peer, purpose, left)
            except RefusedError as e:
                raise LinkError(f"{self._me.who(peer)} refuses {self._me.who(self._me.rank)}: {e}", peer) from None
            except HandshakeError as e:
                why = f": {one_line(e)}"
            except OSError as e:
                # Whoever could be talked to has told more.
                why = why or f": {e.strerror or one_line(e)}" if left < 2 * RETRY_S else why
            time.sleep(min(RETRY_S, left))
        raise LinkError(self._absent([peer]) + why, peer)

    def _connected(self, peer: int, purpose: str, left: float) -> socket.socket:
        within = min(left, self._limits.handshake)
        sock = socket.create_connection(self._me.addresses[peer], timeout=within)
        try:
            ask(sock, self._me.key, self._me.facts(peer, purpose), within)
        except BaseException:
            sock.close()
            raise
        return sock

    # The lower rank's side.

    def _await_others(self) -> None:
        wanted = {(peer, purpose) for peer in range(self._me.rank + 1, self._me.size) for purpose in (CONTROL, DATA)}
        with self._changed:
            while missing := wanted - self._there.keys():
                left = self._end - time.monotonic()
                if left <= 0:
                    ranks = sorted({peer for peer, _ in missing})
                    last = f"; last refused: {self._refused}" if self._refused else ""
                    if not self._refused and self._nobody(ranks):
                        raise LinkError(
                            f"{self._me.who(self._me.rank)}: has met nobody within {self._limits.start:.3g} s of the "
                            f"start; {', '.join(map(self._me.who, ranks))} should be there",
                            self._me.rank,
                        )
                    raise LinkError(self._absent(ranks) + last, ranks[0])
                self._changed.wait(min(left, CHECK_S))
                self._check()

    def _check(self) -> None:
        if (reason := self._alone()) is not None:
            raise LinkError(f"{self._me.who(self._me.rank)}: {reason}", self._me.rank)

    def _nobody(self, missing: list[int]) -> bool:
        """Whether all others are missing, on several hosts: then rather this one is cut off than all of them."""
        return len(missing) == self._me.size - 1 and len({self._me.names[rank] for rank in missing}) > 1

    def _absent(self, ranks: list[int]) -> str:
        who = ", ".join(map(self._me.who, ranks))
        return f"{who} did not come within {self._limits.start:.3g} s of the start"

    def _accept(self) -> None:
        self._listener.settimeout(RETRY_S)
        while True:
            with self._changed:
                if self._over:
                    return
            try:
                sock, address = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                time.sleep(RETRY_S)  # no descriptors left, or a connection that broke at once
                continue
            with self._changed:
                self._greeting.append(sock)
                if len(self._greeting) > MOST_GREETED:
                    # Its thread closes it.
                    with contextlib.suppress(OSError):
                        self._greeting.pop(0).shutdown(socket.SHUT_RDWR)
            name = f"outcore-link-greet-{address[0]}"
            threading.Thread(target=self._greet, args=(sock, str(address[0])), name=name, daemon=True).start()

    def _greet(self, sock: socket.socket, address: str) -> None:
        kept = False
        try:
            theirs = answer(sock, self._me.key, self._judged, self._limits.handshake)
            with self._changed:
                there = self._there.get((theirs.rank, theirs.purpose))
                # Who had to make room is cut off already.
                if not self._over and sock in self._greeting and (there is None or _gone(there)):
                    self._greeting.remove(sock)
                    self._there[theirs.rank, theirs.purpose] = sock
                    kept = True
        except (OSError, HandshakeError) as e:
            with self._changed:
                self._refused = f"{address}: {one_line(e)}"
        finally:
            with self._changed:
                if sock in self._greeting:
                    self._greeting.remove(sock)
                self._changed.notify_all()
            if not kept:
                sock.close()

    def _judged(self, theirs: Facts) -> Facts:
        """What to answer to one who has the key."""
        me = self._me
        mine = me.facts(theirs.rank, theirs.purpose)
        if theirs.run != me.run:
            return replace(mine, reason="another run")
        if theirs.version != me.version:
            reason = f"Outcore {theirs.version} there, {me.version} here: install the same version on all hosts"
            return replace(mine, reason=reason)
        if theirs.size != me.size or theirs.to != me.rank or not me.rank < theirs.rank < me.size:
            reason = f"rank {theirs.rank} of {theirs.size} for rank {theirs.to}, at rank {me.rank} of {me.size}"
            return replace(mine, reason=reason)
        if theirs.purpose not in (CONTROL, DATA):
            return replace(mine, reason="no such purpose")
        with self._changed:
            there = self._there.get((theirs.rank, theirs.purpose))
        if there is not None and not _gone(there):
            return replace(mine, reason=f"there is a rank {theirs.rank} already")
        return mine


def listen(address: tuple[str, int], who: str) -> socket.socket:
    """A listening socket.

    Raises:
        LinkError: the address is not this machine's, or in use.
    """
    try:
        family, _, _, _, place = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(place)
            sock.listen(MOST_GREETED)
        except BaseException:
            sock.close()
            raise
    except OSError as e:
        raise LinkError(f"{who} cannot listen at {address[0]}:{address[1]}: {e.strerror or one_line(e)}") from e
    return sock


def _gone(sock: socket.socket) -> bool:
    """Whether who was at the other end has hung up."""
    before = sock.gettimeout()
    try:
        sock.setblocking(False)
        return not sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        with contextlib.suppress(OSError):
            sock.settimeout(before)
