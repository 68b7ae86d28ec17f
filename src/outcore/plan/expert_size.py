"""Routed experts in numbers: what they weigh, how often they will be in memory, and when to go over all of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ExpertSize:
    """The experts of one layer. Bytes are of one of them.

    Attributes:
        count: how many there are; ``used``: by a token.
        resident: in memory; ``read``: on disk.
        pieces: of the layer, those that are its experts'.
        tensors: that it is made of.
        cast: they are held in another dtype than on disk.
        copied: of what is in memory by expert in any case (an adapter's): a call copies it for each slot.
    """

    count: int
    used: int
    resident: int
    read: int
    pieces: tuple[int, ...]
    tensors: int = 1
    cast: bool = False
    copied: int = 0

    def missing(self, slots: int, tokens: int = 1) -> float:
        """As the function, of this layer."""
        return missing(self.count, self.used, slots, tokens)


HITS = ((0.0, 0.0), (0.0625, 0.18), (0.1, 0.25), (0.25, 0.53), (0.5, 0.78), (0.75, 0.93), (1.0, 1.0))
"""Share of a layer's experts that have slots, and of uses that find theirs there: means of 2,500 tokens of code and of
prose (py-qwen35moe-30m, ``ExpertPolicy``)."""


def hit_rate(share: float) -> float:
    """Uses that find their expert in memory, as a share of all, where so large a share of them has slots."""
    for (a, low), (b, high) in itertools.pairwise(HITS):
        if share <= b:
            return low + (high - low) * (share - a) / (b - a)
    return 1.0


def distinct(count: int, used: int, tokens: int) -> float:
    """Experts that so many tokens use between them, if each chose by chance: they use fewer, as a rule."""
    return count * (1 - (1 - min(1.0, used / count)) ** tokens)


def missing(count: int, used: int, slots: int, tokens: int) -> float:
    """Experts that a call for so many tokens has to read, on average, with so many slots for those of its layer."""
    wanted = distinct(count, used, tokens)
    return max(wanted * (1 - hit_rate(slots / count)), wanted - slots)


MOST_GROUPS = 3
"""Times that experts may be computed with for one call, a pool full at a time, rather than let all of them pass by."""

WORTH = 0.8
"""Reading what is missing is worth its waits where that is less than this share of what would pass by."""


def pooled_sweep(tokens: int, shapes: Sequence[tuple[int, int, int]]) -> bool:
    """Whether a sweep over so many tokens reads what it uses; else all experts pass by, each read once.

    Args:
        shapes: of each layer, experts, those that a token uses, and slots.
    """
    if tokens == 1:
        return True
    if any(distinct(count, used, tokens) > MOST_GROUPS * slots for count, used, slots in shapes):
        return False
    reads = sum(missing(*shape, tokens) for shape in shapes)
    return reads <= WORTH * sum(count - slots for count, _, slots in shapes)
