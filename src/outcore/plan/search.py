"""Plans of one model that are looked at: which of them can fit at all is told without cutting layers into parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache

from .candidate import Candidate, Made
from .model_size import ModelSize


class Search:
    """What candidates of one model share.

    Args:
        place: which layers stay, by how many do.
    """

    def __init__(self, size: ModelSize, place: Callable[[int], Iterable[int]]) -> None:
        self._size, self._place = size, place
        self._made: Made = {}
        self.stay, self._weights, self._beside = cache(self._stay), cache(self._resident), cache(self._all_else)

    def at(self, count: int, head: bool, step: int, ring: int, unit: int) -> Candidate:
        """The candidate with so many layers resident; the others as in ``Candidate``."""
        return Candidate(self._size, self.stay(count), head, step, ring, unit, made=self._made)

    def first(
        self, counts: Iterable[int], head: bool, step: int, ring: int, unit: int, budget: int
    ) -> Candidate | None:
        """The first of these numbers of resident layers that fits into so many bytes."""
        for count in counts:
            if self.least(count, head, step) <= budget:
                found = self.at(count, head, step, ring, unit)
                if found.peak <= budget:
                    return found
        return None

    def smallest(self, counts: Iterable[int], head: bool, step: int, ring: int, unit: int) -> int:
        """The smallest peak in bytes of these numbers of resident layers."""
        found: int | None = None
        for count in counts:
            if found is None or self.least(count, head, step) < found:
                peak = self.at(count, head, step, ring, unit).peak
                found = peak if found is None else min(found, peak)
        assert found is not None
        return found

    def least(self, count: int, head: bool, step: int) -> int:
        """Bytes that a candidate's peak is not below, whatever its slots and units are."""
        return self._weights(count) + self._beside(head, step)

    def _stay(self, count: int) -> frozenset[int]:
        return frozenset(self._place(count))

    def _resident(self, count: int) -> int:
        return sum(self._size.layers[i].resident for i in self.stay(count))

    def _all_else(self, head: bool, step: int) -> int:
        """All but layers, slots and copies, as if tables that may be streamed were."""
        size = self._size
        streamed = size.tables + (size.head.resident if head and size.head is not None else 0)
        return size.non_layer - streamed + size.activations(step) + (0 if size.on_disk else size.caches(0.0))
