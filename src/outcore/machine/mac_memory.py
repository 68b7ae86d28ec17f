"""macOS's memory as one reading: what can be had without compressing anything, what with it, and when macOS will warn.

Never tried on a Mac. How xnu comes to its pressure level is read in its source (xnu-11417, macOS 15.4):
``vm_pressure_response`` in osfmk/vm/vm_pageout.c goes by ``VM_PRESSURE_NORMAL_TO_WARNING`` and
``VM_PRESSURE_WARNING_TO_NORMAL``, and those by a ratio of pages:

    available = active + inactive + free + speculative      AVAILABLE_NON_COMPRESSED_MEMORY, osfmk/vm/vm_page.h
    threshold = (available + compressor) * 10 / 20          VM_PAGE_COMPRESSOR_COMPACT_THRESHOLD, vm_compressor_xnu.h;
                                                            the 20 is set by vm_compressor_init for more than 3 GiB
    warning   available < threshold                         so: less than what the compressor holds
    normal    available > 1.2 * threshold                   so: more than 1.5 times that
    critical  available < 1.2 * (available + compressor) * 10 / 35, or no room left to compress or swap to

Wired pages, as weights are that the GPU works on, are in none of these: wiring them makes ``available`` smaller and
with it the ratio, however much of the rest is free. And once macOS has warned it goes on until half as much again is
available as the compressor takes: giving some weights up may change nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from . import memory_calls
from .memory_calls import MemoryCalls, VmStatistics

NORMAL, WARNING, CRITICAL = 1, 2, 4
"""What ``kern.memorystatus_vm_pressure_level`` says: NOTE_MEMORYSTATUS_PRESSURE_* in bsd/sys/event_private.h."""

COMPRESSED_TO = 1 / 2
"""Share of an inactive page of a program's that is still taken when it is compressed: xnu's compressor mostly does
better (not measured here), and a page that cannot be compressed stays whole."""


@dataclass(frozen=True)
class MacMemory:
    """One reading. Bytes.

    Attributes:
        total: memory of the machine.
        pages: what they are used for; ``page`` bytes each.
        level: 1 normal, 2 warning, 4 critical; None: not told.
    """

    total: int
    pages: VmStatistics
    page: int
    level: int | None = None

    @property
    def uncompressed(self) -> int:
        """What can be had without compressing anything: free memory, what may go, and files that are not in use.

        Of files at most as much as there are inactive pages: those in active use are code that is running.
        """
        p = self.pages
        # Speculative pages are counted as free, and as files.
        return self._bytes(p.free + p.purgeable + self._files)

    @property
    def available(self) -> int:
        """What can be had if other programs' inactive memory is compressed too."""
        p = self.pages
        idle = max(0, p.inactive - self._files - p.purgeable)
        return self.uncompressed + int(self._bytes(idle) * (1 - COMPRESSED_TO))

    @property
    def warning_room(self) -> int:
        """What can be wired before macOS warns of memory pressure, if nothing else changes; never negative."""
        p = self.pages
        return self._bytes(max(0, p.active + p.inactive + p.free - p.compressor))

    @property
    def _files(self) -> int:
        p = self.pages
        return min(p.inactive, max(0, p.external - p.speculative))

    def _bytes(self, pages: int) -> int:
        return pages * self.page


def mac_memory(calls: MemoryCalls | None = None) -> MacMemory | None:
    """What macOS says of its memory now; None where this is no Mac, or it does not say."""
    calls = calls or memory_calls.SYSTEM
    pages = calls.vm_statistics()
    total, page = calls.number("hw.memsize"), calls.number("hw.pagesize")
    if pages is None or not total or not page:
        return None
    return MacMemory(total, pages, page, pressure_level(calls))


def pressure_level(calls: MemoryCalls | None = None) -> int | None:
    """``NORMAL``, ``WARNING`` or ``CRITICAL``; None where there is no such thing.

    The kernel hands out the level as dispatch sources know it, not its own numbers from 0 to 3:
    ``sysctl_memorystatus_vm_pressure_level`` in xnu's bsd/kern/kern_memorystatus_notify.c. On macOS any user may read
    it.
    """
    level = (calls or memory_calls.SYSTEM).number("kern.memorystatus_vm_pressure_level")
    return level if level in (NORMAL, WARNING, CRITICAL) else None


def wired_limit(calls: MemoryCalls | None = None) -> int | None:
    """Bytes that the GPU may wire where the user has said so (``iogpu.wired_limit_mb``); None: macOS decides.

    0 stands for macOS's own share, which MLX tells as the recommended working set.
    """
    megabytes = (calls or memory_calls.SYSTEM).number("iogpu.wired_limit_mb")
    return megabytes << 20 if megabytes else None
