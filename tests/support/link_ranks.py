"""Ranks for tests of the link: in threads of one process, and as processes that send round a ring."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from outcore_cluster.link import meeting
from outcore_cluster.link.meeting import Facts, Identity, listen
from outcore_cluster.link.socket_link import SocketLink
from outcore_cluster.link_protocol import LinkLimits

KEY = b"k" * 32
# A busy machine may run nothing of a process for seconds; who tests that silence is noticed states less of it.
QUICK = LinkLimits(beat=0.1, silence=20.0, stall=20.0, start=60.0, handshake=0.5, grace=0.3)


def handshake(sock: socket.socket, *more: Any) -> Facts:
    """``meeting.handshake``, on a socket that may block."""
    sock.setblocking(False)
    return asyncio.run(meeting.handshake(sock, *more))


def facts(me: Identity, purpose: str) -> Facts:
    """What a rank tells rank 0 of itself."""
    return Facts(me.version, me.run, len(me.addresses), me.rank, 0, purpose)


def identities(size: int, run: str = "test") -> tuple[list[Identity], list[socket.socket]]:
    """Ranks on ports of this host that are free, and what they listen with."""
    listeners = [listen(("127.0.0.1", 0), f"rank {rank}") for rank in range(size)]
    addresses = [("127.0.0.1", listener.getsockname()[1]) for listener in listeners]
    names = [f"host{rank}" for rank in range(size)]
    return [Identity(rank, addresses, names, run, KEY, "1.0") for rank in range(size)], listeners


def in_threads(work: Sequence[Callable[[], Any]], timeout_s: float = 120.0) -> list[Any]:
    """Call each in a thread of its own; what each returned or raised."""
    results: list[Any] = [None] * len(work)

    def one(number: int) -> None:
        try:
            results[number] = work[number]()
        except BaseException as e:
            results[number] = e

    threads = [threading.Thread(target=one, args=(number,), daemon=True) for number in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    return results


@contextlib.contextmanager
def linked(size: int, limits: LinkLimits = QUICK, **changes: Any) -> Iterator[list[SocketLink]]:
    """Links of so many ranks."""
    ranks, listeners = identities(size)
    limits = replace(limits, **changes)
    made = in_threads(
        [
            lambda me=me, listener=listener: SocketLink(me, limits, listener, leave=None)  # type: ignore[misc]
            for me, listener in zip(ranks, listeners, strict=True)
        ]
    )
    for link in made:
        if isinstance(link, BaseException):
            raise link
    try:
        yield made
    finally:
        in_threads([link.close for link in made])
