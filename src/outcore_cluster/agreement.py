"""Values that all ranks of a model have to agree on, because they do not follow from what all of them have."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from outcore.text import one_line

from .link_protocol import Link


class RankAgreement:
    """Agreement with the other ranks over a link (``engine.transport.Transport``)."""

    alone = False

    def __init__(self, link: Link) -> None:
        self.link = link
        self.chooses = link.rank == 0  # rank 0 has the logits

    def numbers(self, choose: Callable[[], Sequence[int]]) -> list[int]:
        mine = array("q", choose() if self.chooses else ()).tobytes()
        return array("q", self.link.agree(mine)).tolist()

    def give_up(self, error: Exception) -> None:
        """Ends the run: other ranks wait for work that failed here, and would take the next value for its result."""
        self.link.fail(f"no token was chosen: {one_line(error)}")

    def text(self, tell: Callable[[], str]) -> str:
        return self.link.agree(tell().encode() if self.chooses else b"").decode()

    def leasts(self, values: Sequence[int]) -> list[int]:
        gathered = self.link.gather(array("q", values).tobytes())
        return list(map(min, zip(*(array("q", each) for each in gathered), strict=True)))

    def working(self) -> AbstractContextManager[object]:
        return self.link.working()
