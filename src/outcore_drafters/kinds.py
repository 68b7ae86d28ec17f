"""The kinds of published drafters that are known."""

from __future__ import annotations

from .dflash import DFlash
from .dflash2 import DFlash2
from .drafter import BlockDrafter
from .dspark import DSpark
from .eagle3 import Eagle3

# A config is of the first kind that claims it.
KINDS: tuple[type[BlockDrafter], ...] = (Eagle3, DFlash2, DSpark, DFlash)
