"""The kinds of published drafters that are known."""

from __future__ import annotations

from .drafter import BlockDrafter
from .eagle3 import Eagle3

# A config is of the first kind that claims it.
KINDS: tuple[type[BlockDrafter], ...] = (Eagle3,)
