"""The interface of the link between ranks: messages of bytes, and values that all ranks agree on,
such as sampled tokens, room for texts and chunk lengths."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from outcore.text import one_line


@dataclass(frozen=True)
class LinkLimits:
    """Time limits in seconds. After a fault all ranks have ended within ``silence + grace`` and one heartbeat.

    Attributes:
        beat: between two heartbeats.
        silence: after so long without a heartbeat, a rank counts as gone.
        stall: a rank that another waits for counts as stuck after so long without work (processor time, reads), unless
            it waits for a rank itself.
        computing: how long one evaluation on a GPU, which takes no processor time, counts as work.
        start: until all ranks are connected.
        handshake: for the handshake of one connection.
        grace: for the main thread to end by itself once the run has failed.
    """

    beat: float = 1.0
    silence: float = 5.0
    stall: float = 5.0
    computing: float = 60.0
    start: float = 60.0
    handshake: float = 2.0
    grace: float = 2.0


class Arrival(Protocol):
    """A receive that was posted; ``ready`` once its bytes have arrived."""

    @property
    def ready(self) -> bool: ...

    def wait(self) -> None:
        """Waits for the bytes. Raises ``LinkError``, which names the peer's rank and host, if that rank is gone or
        silent, or sent another number of bytes."""


class Link(Protocol):
    """One rank's connections to all others, for one thread at a time. ``size`` is the number of ranks."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def send(self, to: int, data: memoryview) -> None:
        """Queues a message to rank ``to``. The link keeps ``data`` alive until it is sent; its bytes must not change
        before."""

    def receive(self, source: int, into: memoryview) -> Arrival:
        """Posts a receive into ``into`` for the next message of rank ``source``. A rank's messages arrive in the order
        in which it sent them."""

    def agree(self, value: bytes) -> bytes:
        """Returns rank 0's value on all ranks. All ranks call it in the same order."""

    def gather(self, value: bytes) -> list[bytes]:
        """Returns all ranks' values, by rank, on all ranks. All ranks call it in the same order."""

    def working(self) -> AbstractContextManager[None]:
        """Marks an evaluation on this rank's device; it counts as work for up to ``LinkLimits.computing`` seconds."""

    def check(self) -> None:
        """Raises ``LinkError`` if the run has failed. Does not wait."""

    def fail(self, reason: str) -> None:
        """Ends the run on all ranks."""

    def flush(self) -> None:
        """Waits until all queued messages were sent."""

    def close(self) -> None:
        """Ends this rank's part. Safe to call twice."""


class RankAgreement:
    """Implements ``engine.transport.Agreement`` by messages to the other ranks."""

    alone = False

    def __init__(self, link: Link) -> None:
        self.link = link
        self.chooses = link.rank == 0  # rank 0 has the logits

    def numbers(self, choose: Callable[[], Sequence[int]]) -> list[int]:
        mine = array("q", choose() if self.chooses else ()).tobytes()
        return array("q", self.link.agree(mine)).tolist()

    def give_up(self, error: Exception) -> None:
        """Ends the run on all ranks. Without this, the others would take the next value sent for the missing token."""
        self.link.fail(f"no token was chosen: {one_line(error)}")

    def text(self, tell: Callable[[], str]) -> str:
        return self.link.agree(tell().encode() if self.chooses else b"").decode()

    def leasts(self, values: Sequence[int]) -> list[int]:
        gathered = self.link.gather(array("q", values).tobytes())
        return list(map(min, zip(*(array("q", each) for each in gathered), strict=True)))

    def working(self) -> AbstractContextManager[object]:
        return self.link.working()
