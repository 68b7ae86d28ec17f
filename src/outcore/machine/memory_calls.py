"""What is asked of macOS and of MLX about memory, in one place, so that a test can stand for a Mac.

Values as the system gives them; what they mean is said elsewhere (`mac_memory`, `memory`, `pressure`, `hardware`). All
by ``ctypes``, and never tried on a Mac: structures and numbers are those of xnu's headers, named where they are used.
Linux's files are read below a ``root`` instead.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import mlx.core as mx
import psutil  # type: ignore[import-untyped]

from . import device

_LONGEST = 256
"""Bytes of a value; names of processors are shorter."""


class VmStatistics(ctypes.Structure):
    """``struct vm_statistics64`` of xnu's osfmk/mach/vm_statistics.h: pages of the machine's own size; natural_t has 32
    bits. 38 of them in all, HOST_VM_INFO64_REV1_COUNT. Of these are read:

    Attributes:
        free: free pages, and the speculative ones.
        active, inactive: pages that can be taken away: of files, and of programs' own memory.
        purgeable: pages whose owners have said that they may go.
        speculative: pages of files that were read ahead; counted in ``external`` too.
        compressor: pages that hold others in compressed form.
        external: of active, inactive and speculative ones: those of files.
        decompressions: pages, since the machine started.
        swapins, swapouts: pages of the compressor's that went from the disk and to it, since the machine started.
    """

    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("free", "active", "inactive", "wired")),
        *(
            (name, ctypes.c_uint64)
            for name in ("zero_fill", "reactivations", "pageins", "pageouts", "faults", "cow_faults", "lookups", "hits",
                         "purges")
        ),
        *((name, ctypes.c_uint32) for name in ("purgeable", "speculative")),
        *((name, ctypes.c_uint64) for name in ("decompressions", "compressions", "swapins", "swapouts")),
        *((name, ctypes.c_uint32) for name in ("compressor", "throttled", "external", "internal")),
        ("uncompressed", ctypes.c_uint64),
    )  # fmt: skip


class MemoryCalls:
    """The system that this process runs on. None stands for what it does not tell.

    Args:
        library: what has the C library's functions; this process's own by default.
    """

    def __init__(self, library: Any = None) -> None:
        self._library = library or ctypes.CDLL(None)

    def sysctl(self, name: str) -> bytes | None:
        """The value of that name (sysctlbyname(3)); None where there is no such name, or no sysctl, as on Linux."""
        read = getattr(self._library, "sysctlbyname", None)
        if read is None:
            return None
        value, size = ctypes.create_string_buffer(_LONGEST), ctypes.c_size_t(_LONGEST)
        if read(name.encode(), value, ctypes.byref(size), None, ctypes.c_size_t(0)):
            return None
        return value.raw[: size.value]

    def number(self, name: str) -> int | None:
        """A number of the kernel's, of four or eight bytes."""
        value = self.sysctl(name)
        return int.from_bytes(value, sys.byteorder) if value is not None and len(value) in (4, 8) else None

    def text(self, name: str) -> str:
        """A text of the kernel's; empty where there is none."""
        return (self.sysctl(name) or b"").partition(b"\0")[0].decode(errors="replace").strip()

    def vm_statistics(self) -> VmStatistics | None:
        """``host_statistics64`` with HOST_VM_INFO64 (4 in xnu's osfmk/mach/host_info.h).

        For programs that are not Apple's, xnu looks two to ten times a second, for all of them together, and hands out
        the numbers before for the rest of it (``rate_limit_host_statistics`` in osfmk/kern/host.c): what is read may be
        a second old.
        """
        if self._host is None:
            return None
        found, count = VmStatistics(), ctypes.c_uint32(ctypes.sizeof(VmStatistics) // 4)
        failed = self._library.host_statistics64(self._host, 4, ctypes.byref(found), ctypes.byref(count))
        # A kernel that fills in less than this knows no compressor.
        return None if failed or count.value < ctypes.sizeof(VmStatistics) // 4 else found

    @cached_property
    def _host(self) -> ctypes.c_uint32 | None:
        # Each call makes another right to the port: asked once.
        ask = getattr(self._library, "mach_host_self", None)
        return None if ask is None else ctypes.c_uint32(ask())

    def machine(self) -> tuple[int, int]:
        """Bytes of memory of the machine, and those that can still be allocated, as psutil has them."""
        found = psutil.virtual_memory()
        return int(found.total), int(found.available)

    def metal(self) -> bool:
        """Whether MLX computes with Metal."""
        return bool(mx.metal.is_available())

    def device_info(self) -> Mapping[str, Any]:
        """What MLX says of its default device."""
        found: Mapping[str, Any] = mx.device_info()
        return found

    def metal_info(self) -> Mapping[str, Any]:
        """As ``device.metal_info``."""
        return device.metal_info()

    def device_bytes(self) -> tuple[int, int]:
        """Bytes that MLX holds: in arrays, and for reuse."""
        return mx.get_active_memory(), mx.get_cache_memory()


SYSTEM = MemoryCalls()
"""What is asked where no other calls are given."""
