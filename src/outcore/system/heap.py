"""Memory that was freed, given back to the system: Python and the C library keep some of it for later."""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress


def give_back() -> None:
    """After something large has gone. Objects that refer to each other go first; macOS needs no word of the second."""
    gc.collect()
    with suppress(AttributeError, OSError):  # glibc alone has it (malloc_trim(3))
        ctypes.CDLL(None).malloc_trim(0)
