"""What ranks say to each other: bytes in order, one value for all, and a sign of life."""

from __future__ import annotations

from typing import Protocol


class Arrival(Protocol):
    """A receive that is under way."""

    @property
    def ready(self) -> bool:
        """Whether the bytes are there, or never will be: ``wait`` returns or raises at once."""
        ...

    def wait(self) -> None:
        """Wait for the bytes.

        Raises:
            LinkError: names rank and host that are gone, silent, or sent something else.
        """
        ...


class Link(Protocol):
    """One rank's side of a run on several.

    Attributes:
        rank: this process, from 0 on.
        size: how many there are.
    """

    rank: int
    size: int

    def send(self, to: int, data: memoryview) -> None:
        """Queue bytes for a rank. They stay as they are until ``flush``, unless the link copies them."""
        ...

    def receive(self, source: int, into: memoryview) -> Arrival:
        """Post a receive. What a rank sent comes in the order in which it was sent; a length that differs is an
        error."""
        ...

    def agree(self, value: bytes) -> bytes:
        """Rank 0's value, on all ranks; all of them ask, in the same order."""
        ...

    def gather(self, value: bytes) -> list[bytes]:
        """Everybody's value, by rank, on all ranks; all of them ask, in the same order."""
        ...

    def progress(self) -> None:
        """Note that this rank has done something."""
        ...

    def flush(self) -> None:
        """Wait until what was queued has left."""
        ...

    def close(self) -> None:
        """End this rank's part. May be called again."""
        ...
