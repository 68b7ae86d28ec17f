"""Memory that was freed, given back to the system: Python and the C library keep some of it for later."""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress

_ARENA_MAX = -8  # malloc.h


def share_one_heap() -> None:
    """All threads that are begun from now on allocate from one heap: of glibc's others ``give_back`` cannot give back
    the end (mallopt(3), malloc_trim(3)). Elsewhere it does nothing."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(_ARENA_MAX, 1)


def give_back() -> None:
    """After something large has gone. Objects that refer to each other go first; macOS needs no word of the second."""
    gc.collect()
    with suppress(AttributeError, OSError):  # glibc alone has it
        ctypes.CDLL(None).malloc_trim(0)
