"""What ranks that share a model have to agree on: whatever does not follow from what all of them have."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from outcore.text import one_line

from .link_protocol import Link


class RankAgreement:
    """What one rank knows of the others' choices (``engine.transport.Transport``).

    Args:
        link: to the other ranks.
    """

    alone = False

    def __init__(self, link: Link) -> None:
        self.link = link
        self.chooses = link.rank == 0  # it has the logits

    def numbers(self, choose: Callable[[], Sequence[int]]) -> list[int]:
        """Whole numbers that the first rank chooses."""
        mine = array("q", choose() if self.chooses else ()).tobytes()
        return array("q", self.link.agree(mine)).tolist()

    def give_up(self, error: Exception) -> None:
        """What this rank alone has to do has failed, which the others wait for: the run ends, or they would take what
        comes next for it."""
        self.link.fail(f"no token was chosen: {one_line(error)}")

    def text(self, tell: Callable[[], str]) -> str:
        """A text that it has."""
        return self.link.agree(tell().encode() if self.chooses else b"").decode()

    def leasts(self, values: Sequence[int]) -> list[int]:
        """Of each value the least that a rank has."""
        told = self.link.gather(array("q", values).tobytes())
        return list(map(min, zip(*(array("q", each) for each in told), strict=True)))

    def working(self) -> AbstractContextManager[object]:
        """While a device is waited for, which other ranks wait for."""
        return self.link.working()
