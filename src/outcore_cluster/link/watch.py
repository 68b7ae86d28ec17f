"""Who is at fault: numbers in, a verdict out. No sockets, no clock of its own."""

from __future__ import annotations

import errno
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from outcore.text import one_line

from .movement import NOBODY, Sign, Wait

GONE = "its process has ended, or its connection broke"


def broke(error: OSError | EOFError) -> str:
    """What an error of a connection says of the rank at its other end. A process that ends with bytes unread resets
    its connections."""
    if not isinstance(error, OSError) or error.errno in (errno.ECONNRESET, errno.EPIPE, errno.ECONNABORTED):
        return GONE
    return f"its connection broke: {error.strerror or one_line(error)}"


@dataclass(frozen=True)
class Blame:
    """A rank, and what is wrong with it."""

    rank: int
    what: str


def silent(me: int, names: Sequence[str], heard: Mapping[int, float], now: float, silence_s: float) -> Blame | None:
    """The rank that was heard of last, if that was too long ago; this one, where nothing comes from any of several
    hosts: it is more probable that its own cable is out than all of theirs.

    Args:
        names: of the hosts, by rank.
        heard: when each rank was last heard of, of those that are watched.
    """
    if not heard:
        return None
    rank = min(heard, key=lambda peer: heard[peer])
    if now - heard[rank] <= silence_s:
        return None
    if len({names[peer] for peer in heard}) > 1 and now - max(heard.values()) > silence_s / 2:
        return Blame(me, f"has heard nothing of the others for {silence_s:.3g} s")
    return Blame(rank, f"silent for {silence_s:.3g} s")


def stuck(
    me: int, wait: Wait | None, signs: Mapping[int, Sign], now: float, stall_s: float, quiet_s: float = math.inf
) -> Blame | None:
    """Who holds this rank up without doing anything, found along the chain of who waits for whom.

    A rank at the chain's end that computes or reads holds nobody up for no reason, however long it takes. One that
    waits for rank 0's next value is not held up at all, unless rank 0 waits for it, too: then nothing comes any more.

    Args:
        wait: what this rank waits for. signs: of the others, as their last heartbeats told.
        quiet_s: seconds since bytes last came or went here: what one has sent may be on its way for long, and where the
            connection is slow whoever sent it has nothing to do meanwhile.
    """
    if wait is None or now - wait.since < stall_s or quiet_s < stall_s:
        return None
    chain, at, due = [me], wait.rank, wait.due
    while True:
        sign = signs.get(at)
        if at in chain:
            return Blame(
                chain[1] if len(chain) > 1 else at, f"{_listed(chain[chain.index(at) :])} wait for one another"
            )
        if sign is None or sign.still_s < stall_s:
            return None
        if sign.waits_for == NOBODY:
            if not due:  # rank 0 may be waiting for a user
                return None
            return Blame(at, f"has done nothing for {sign.still_s:.0f} s, while rank {chain[-1]} waits for it")
        due = due and sign.due
        chain.append(at)
        at = sign.waits_for


def _listed(ranks: Iterable[int]) -> str:
    return "ranks " + " and ".join(map(str, sorted(ranks)))
