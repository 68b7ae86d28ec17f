"""How ranks agree on values that could differ between them: sampled tokens, room for texts, chunk lengths."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from outcore.text import one_line

from .link_protocol import Link


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
