"""What ranks that share a model have to agree on: whatever does not follow from what all of them have."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

from outcore.text import one_line

from .link.link import Link


class Agreement:
    """What one rank knows of the others' choices. A model that is all here agrees with itself.

    Args:
        link: to the other ranks; None: there are none.
    """

    def __init__(self, link: Link | None) -> None:
        self._link = link

    @property
    def alone(self) -> bool:
        """Whether nobody else has to agree."""
        return self._link is None

    @property
    def chooses(self) -> bool:
        """Whether this rank chooses: the one that has the logits."""
        return self._link is None or self._link.rank == 0

    def numbers(self, choose: Callable[[], Sequence[int]]) -> list[int]:
        """Whole numbers that the first rank chooses."""
        if self._link is None:
            return list(choose())
        mine = array("q", choose() if self.chooses else ()).tobytes()
        return array("q", self._link.agree(mine)).tolist()

    def number(self, choose: Callable[[], int]) -> int:
        """One that it chooses."""
        return self.numbers(lambda: [choose()])[0]

    def give_up(self, error: Exception) -> None:
        """What this rank alone has to do has failed, which the others wait for: the run ends, or they would take what
        comes next for it."""
        if self._link is not None:
            self._link.fail(f"no token was chosen: {one_line(error)}")

    def text(self, tell: Callable[[], str]) -> str:
        """A text that it has."""
        if self._link is None:
            return tell()
        return self._link.agree(tell().encode() if self.chooses else b"").decode()

    def least(self, value: int) -> int:
        """The least of what all ranks have."""
        return self.leasts([value])[0]

    def leasts(self, values: Sequence[int]) -> list[int]:
        """The same of as many values as each has."""
        if self._link is None:
            return list(values)
        told = self._link.gather(array("q", values).tobytes())
        return list(map(min, zip(*(array("q", each) for each in told), strict=True)))

    def seconds(self, value: float) -> float:
        """The sum of what all ranks have."""
        if self._link is None:
            return value
        return sum(array("d", told)[0] for told in self._link.gather(array("d", [value]).tobytes()))


def agreement_of(model: Any) -> Agreement:
    """Among the ranks that share a model."""
    return Agreement(getattr(getattr(model, "outcore", None), "link", None))
