"""What is asked of macOS and of MLX about memory, in one place, so that a test can stand for a Mac.

Values as the system gives them; what they mean is said elsewhere (`mac_memory`, `memory`, `pressure`, `hardware`). All
by ``ctypes``, and never tried on a Mac: structures and numbers are those of xnu's headers, named where they are used.
Linux's files are read below a ``root`` instead.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
import psutil  # type: ignore[import-untyped]


@dataclass(frozen=True)
class VmStatistics:
    """``struct vm_statistics64`` of xnu's osfmk/mach/vm_statistics.h, the fields that tell of pressure. Pages of the
    machine's own size; the last six are counters since it started.

    Attributes:
        free: free pages, and the speculative ones.
        active, inactive: pages that can be taken away: of files, and of programs' own memory.
        wired: pages that cannot be: the kernel's, and what the GPU works on.
        purgeable: pages whose owners have said that they may go.
        speculative: pages of files that were read ahead; counted in ``external`` too.
        compressor: pages that hold others in compressed form.
        external, internal: of active, inactive and speculative ones: those of files, and the rest.
        pageins, pageouts: of files.
        decompressions, compressions: pages.
        swapins, swapouts: pages of the compressor's that went from the disk and to it.
    """

    free: int = 0
    active: int = 0
    inactive: int = 0
    wired: int = 0
    purgeable: int = 0
    speculative: int = 0
    compressor: int = 0
    external: int = 0
    internal: int = 0
    pageins: int = 0
    pageouts: int = 0
    decompressions: int = 0
    compressions: int = 0
    swapins: int = 0
    swapouts: int = 0


@dataclass(frozen=True)
class Mounted:
    """Where a file lies: the kind of file system, what is mounted, and where."""

    kind: str
    device: str
    point: str


class MemoryCalls(Protocol):
    """What a system is asked. None stands for what it does not tell."""

    def sysctl(self, name: str) -> bytes | None:
        """The value of that name, as the kernel writes it."""

    def vm_statistics(self) -> VmStatistics | None:
        """What every page of the machine is used for, and what has been paged."""

    def mounted(self, path: Path) -> Mounted | None:
        """Where a file or folder lies."""

    def machine(self) -> tuple[int, int]:
        """Bytes of memory of the machine, and those that can still be allocated, as psutil has them."""

    def metal(self) -> bool:
        """Whether MLX computes with Metal."""

    def device_info(self) -> Mapping[str, Any]:
        """What MLX says of its default device."""

    def metal_info(self) -> Mapping[str, Any]:
        """What MLX says of Metal's GPU, which on a Mac has the buffers of the CPU device too; empty elsewhere."""

    def device_bytes(self) -> tuple[int, int]:
        """Bytes that MLX holds: in arrays, and for reuse."""


class SystemCalls:
    """The system that this process runs on.

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

    def vm_statistics(self) -> VmStatistics | None:
        """``host_statistics64`` with HOST_VM_INFO64 (4 in xnu's osfmk/mach/host_info.h).

        For programs that are not Apple's, xnu looks two to ten times a second, for all of them together, and hands out
        the numbers before for the rest of it (``rate_limit_host_statistics`` in osfmk/kern/host.c): what is read may be
        a second old.
        """
        if self._host is None:
            return None
        found, count = _VmStatistics64(), ctypes.c_uint32(ctypes.sizeof(_VmStatistics64) // 4)
        failed = self._library.host_statistics64(self._host, 4, ctypes.byref(found), ctypes.byref(count))
        # A kernel that fills in less than this knows no compressor.
        if failed or count.value < ctypes.sizeof(_VmStatistics64) // 4:
            return None
        return VmStatistics(**{f.name: getattr(found, f.name) for f in fields(VmStatistics)})

    @cached_property
    def _host(self) -> ctypes.c_uint32 | None:
        # Each call makes another right to the port: asked once.
        ask = getattr(self._library, "mach_host_self", None)
        return None if ask is None else ctypes.c_uint32(ask())

    def mounted(self, path: Path) -> Mounted | None:
        """statfs(2) of macOS, whose layout Linux's is not: None there.

        It names the volume that a file is on, where its path may not: what lies below / is on the data volume, by
        firmlinks.
        """
        if not hasattr(self._library, "mach_host_self"):
            return None
        found = _Statfs()
        if self._library.statfs(os.fsencode(path), ctypes.byref(found)):
            return None
        return Mounted(
            found.f_fstypename.decode(errors="replace"),
            os.fsdecode(found.f_mntfromname),
            os.fsdecode(found.f_mntonname),
        )

    def machine(self) -> tuple[int, int]:
        found = psutil.virtual_memory()
        return int(found.total), int(found.available)

    def metal(self) -> bool:
        return bool(mx.metal.is_available())

    def device_info(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = mx.device_info()
        return found

    def metal_info(self) -> Mapping[str, Any]:
        if not self.metal():
            return {}
        found: Mapping[str, Any] = mx.device_info(mx.gpu)
        return found

    def device_bytes(self) -> tuple[int, int]:
        return mx.get_active_memory(), mx.get_cache_memory()


SYSTEM: MemoryCalls = SystemCalls()
"""What is asked where no other calls are given."""

_LONGEST = 256  # bytes; names of processors are shorter


def sysctl_number(name: str, calls: MemoryCalls | None = None) -> int | None:
    """A number of the kernel's, of four or eight bytes."""
    value = (calls or SYSTEM).sysctl(name)
    return int.from_bytes(value, sys.byteorder) if value is not None and len(value) in (4, 8) else None


def sysctl_text(name: str, calls: MemoryCalls | None = None) -> str:
    """A text of the kernel's; empty where there is none."""
    value = (calls or SYSTEM).sysctl(name) or b""
    return value.partition(b"\0")[0].decode(errors="replace").strip()


class _VmStatistics64(ctypes.Structure):
    # osfmk/mach/vm_statistics.h; natural_t has 32 bits. 38 of them in all, HOST_VM_INFO64_REV1_COUNT.
    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("free", "active", "inactive", "wired")),
        *(
            (name, ctypes.c_uint64)
            for name in ("zero_fill", "reactivations", "pageins", "pageouts", "faults", "cow_faults", "lookups", "hits",
                         "purges")
        ),
        ("purgeable", ctypes.c_uint32),
        ("speculative", ctypes.c_uint32),
        *((name, ctypes.c_uint64) for name in ("decompressions", "compressions", "swapins", "swapouts")),
        *((name, ctypes.c_uint32) for name in ("compressor", "throttled", "external", "internal")),
        ("uncompressed", ctypes.c_uint64),
    )  # fmt: skip


class _Statfs(ctypes.Structure):
    # __DARWIN_STRUCT_STATFS64 in bsd/sys/mount.h, which plain statfs is on Apple silicon.
    _fields_ = (
        ("f_bsize", ctypes.c_uint32),
        ("f_iosize", ctypes.c_int32),
        *((name, ctypes.c_uint64) for name in ("f_blocks", "f_bfree", "f_bavail", "f_files", "f_ffree")),
        ("f_fsid", ctypes.c_int32 * 2),
        ("f_owner", ctypes.c_uint32),
        ("f_type", ctypes.c_uint32),
        ("f_flags", ctypes.c_uint32),
        ("f_fssubtype", ctypes.c_uint32),
        ("f_fstypename", ctypes.c_char * 16),
        ("f_mntonname", ctypes.c_char * 1024),
        ("f_mntfromname", ctypes.c_char * 1024),
        ("f_flags_ext", ctypes.c_uint32),
        ("f_reserved", ctypes.c_uint32 * 7),
    )
