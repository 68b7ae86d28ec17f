"""What ranks say to each other: bytes, in order, and values that all of them agree on."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class LinkLimits:
    """Seconds. With a fault, all ranks have ended ``silence + grace`` after it, and one heartbeat.

    Attributes:
        beat: from one heartbeat to the next.
        silence: without a byte of a rank, until it counts as gone.
        stall: in which a rank that others wait for, and that waits for nobody, shows no sign of work, until it counts
            as stuck. Processor time and reads count as work.
        computing: that one evaluation on a GPU, which is no thread's processor time, counts as work.
        start: from the first rank's begin until all are there.
        handshake: that one connection may take to prove who it is.
        grace: that the main thread has for ending by itself, once the run has failed.
    """

    beat: float = 1.0
    silence: float = 5.0
    stall: float = 5.0
    computing: float = 60.0
    start: float = 60.0
    handshake: float = 2.0
    grace: float = 2.0


class Arrival(Protocol):
    """A receive under way."""

    @property
    def ready(self) -> bool:
        """Whether the bytes are there, or never will be."""

    def wait(self) -> None:
        """Return when the bytes are there.

        Raises:
            LinkError: the peer is gone or silent (names its rank and host), or sent another number of bytes.
        """


class Link(Protocol):
    """The connections of one rank to all others. For one thread at a time.

    Attributes:
        rank: of this process. ``size``: ranks in all.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def send(self, to: int, data: memoryview) -> None:
        """Queue bytes for a rank. They must stay as they are until ``flush``, or until the link lets go of ``data``,
        which keeps alive what it shows."""

    def receive(self, source: int, into: memoryview) -> Arrival:
        """Begin to receive the next message of a rank: messages of one sender come in the order they were sent."""

    def agree(self, value: bytes) -> bytes:
        """Rank 0's value, on all ranks; all call it, in the same order."""

    def gather(self, value: bytes) -> list[bytes]:
        """Everybody's values by rank, on all ranks; all call it, in the same order."""

    def working(self) -> AbstractContextManager[None]:
        """This rank's device computes meanwhile, for ``LinkLimits.computing`` seconds at most."""

    def check(self) -> None:
        """Look whether the run goes on, where this rank waits for nothing.

        Raises:
            LinkError: it has failed.
        """

    def fail(self, reason: str) -> None:
        """End the run on all ranks: this one cannot go on."""

    def flush(self) -> None:
        """Wait until all that was queued was sent."""

    def close(self) -> None:
        """End the connections. Safe to call twice."""
