"""A host's memory that several ranks of one run divide, where none of them was given a budget."""

from __future__ import annotations

import os

SHARED_BY = "OUTCORE_MEMORY_SHARED_BY"
"""How many they are, this process too; ``link.guard`` sets it."""


def shared_by() -> int:
    """How many processes divide the memory; 1 for one that has it for itself."""
    found = os.environ.get(SHARED_BY, "1")
    return max(1, int(found)) if found.isdecimal() and len(found) < 6 else 1
