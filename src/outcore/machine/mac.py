"""Values that macOS reports through ``sysctlbyname(3)``. Never tried on a Mac."""

from __future__ import annotations

import ctypes
import sys

# Memory pressure levels: NOTE_MEMORYSTATUS_PRESSURE_* in xnu's bsd/sys/event_private.h; 1 is normal.
WARNING, CRITICAL = 2, 4

# Most bytes of a value; processors' names are shorter.
_LONGEST = 256


def sysctl(name: str) -> bytes | None:
    """Returns a sysctl's value; None where it does not exist, as on Linux."""
    read = getattr(ctypes.CDLL(None), "sysctlbyname", None)
    if read is None:
        return None
    value, size = ctypes.create_string_buffer(_LONGEST), ctypes.c_size_t(_LONGEST)
    failed = read(name.encode(), value, ctypes.byref(size), None, ctypes.c_size_t(0))
    return None if failed else value.raw[: size.value]


def _number(name: str) -> int | None:
    value = sysctl(name)
    return int.from_bytes(value, sys.byteorder) if value is not None and len(value) in (4, 8) else None


def pressure_level() -> int | None:
    """Returns 1, ``WARNING`` or ``CRITICAL``; None where unknown (``sysctl_memorystatus_vm_pressure_level`` in xnu's
    bsd/kern/kern_memorystatus_notify.c)."""
    level = _number("kern.memorystatus_vm_pressure_level")
    return level if level in (1, WARNING, CRITICAL) else None


def wired_limit() -> int | None:
    """Returns the user's limit on bytes that the GPU may wire (``iogpu.wired_limit_mb``); None: macOS decides."""
    megabytes = _number("iogpu.wired_limit_mb")
    return megabytes << 20 if megabytes else None


def cpu_name() -> str:
    return (sysctl("machdep.cpu.brand_string") or b"").partition(b"\0")[0].decode(errors="replace").strip()
