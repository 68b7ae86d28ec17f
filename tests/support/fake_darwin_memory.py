"""A Mac's memory, for tests on any machine: what `memory_calls` asks, answered from a few numbers and xnu's rules.

Pages are free, a file's, a program's own (idle or in use), compressed, or wired. Who takes memory gets free pages,
then those of files, then those that the compressor makes of idle programs' pages, then what it swaps out. The level
follows ``VM_PRESSURE_NORMAL_TO_WARNING`` and its neighbours in xnu's osfmk/vm/vm_pageout.c, as `mac_memory` has them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from outcore.machine.memory_calls import MemoryCalls, VmStatistics

GB = 10**9
PAGE = 16384
RATIO = 3
"""Pages that the compressor makes one of."""


@dataclass
class FakeDarwin(MemoryCalls):
    """A Mac. Bytes, but for counters, which are pages.

    Attributes:
        wired: by the kernel; ``own``: by this process, weights that the GPU works on.
        idle, busy: memory of other programs that they leave alone, and that they work with.
        files: of the page cache. compressed: what the compressor's pages hold, uncompressed.
        compressor_most: bytes that the compressor keeps before it swaps out.
        names: sysctl's other names.
    """

    total: int = 16 * 2**30
    wired: int = 2 * GB
    idle: int = 3 * GB
    busy: int = 2 * GB
    files: int = 3 * GB
    compressed: int = 2 * GB
    own: int = 0
    compressor_most: int = 5 * GB
    counters: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTERS, 0))
    names: dict[str, bytes] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)
    level: int = 1
    told: int | None = None  # a level that is said whatever the pages are
    cached: int = 0

    def __post_init__(self) -> None:
        self.settle()

    @property
    def compressor(self) -> int:
        return self.compressed // RATIO

    @property
    def free(self) -> int:
        return self.total - self.wired - self.own - self.idle - self.busy - self.files - self.compressor

    @property
    def unwired(self) -> int:
        """AVAILABLE_NON_COMPRESSED_MEMORY."""
        return self.free + self.idle + self.busy + self.files

    def settle(self) -> None:
        """Page until nothing is taken that is not there, then set the level."""
        if self.free < 0:
            self.files -= min(self.files, -self.free)
        if self.free < 0:
            pages = min(self.idle, -self.free * RATIO // (RATIO - 1) + PAGE)
            self.idle, self.compressed = self.idle - pages, self.compressed + pages
            self.counters["compressions"] += pages // PAGE
        over = max(self.compressor - self.compressor_most, -self.free)
        if over > 0:
            self.compressed -= over * RATIO
            self.counters["swapouts"] += over // PAGE
        both = self.unwired + self.compressor
        critical, warning = both * 10 // 35, both * 10 // 20
        if self.level != 1 and self.unwired > 1.2 * warning:
            self.level = 1
        elif self.unwired < 1.2 * critical:
            self.level = 4
        elif (self.level == 4 and self.unwired > 1.4 * critical) or (self.level == 1 and self.unwired < warning):
            self.level = 2

    def take(self, nbytes: int) -> None:
        """This process wires so many bytes more, or fewer."""
        self.own += nbytes
        self.settle()

    def wake(self, nbytes: int) -> None:
        """Other programs need again what has been compressed."""
        nbytes = min(nbytes, self.compressed)
        self.compressed, self.busy = self.compressed - nbytes, self.busy + nbytes
        self.counters["decompressions"] += nbytes // PAGE
        self.settle()

    # What memory_calls asks

    def sysctl(self, name: str) -> bytes | None:
        numbers = {
            "hw.memsize": (self.total, 8),
            "hw.pagesize": (PAGE, 8),
            "kern.memorystatus_vm_pressure_level": (self.told or self.level, 4),
        }
        if name in numbers:
            number, size = numbers[name]
            return number.to_bytes(size, sys.byteorder)
        return self.names.get(name)

    def vm_statistics(self) -> VmStatistics | None:
        return VmStatistics(
            free=self.free // PAGE,
            active=self.busy // PAGE,
            inactive=(self.idle + self.files) // PAGE,
            wired=(self.wired + self.own) // PAGE,
            compressor=self.compressor // PAGE,
            external=self.files // PAGE,
            internal=(self.idle + self.busy) // PAGE,
            **self.counters,
        )

    def machine(self) -> tuple[int, int]:
        raise AssertionError("psutil knows no compressor")

    def metal(self) -> bool:
        return True

    def device_info(self) -> Mapping[str, Any]:
        return {
            "device_name": "Apple M4", "memory_size": self.total,
            "max_recommended_working_set_size": self.total * 2 // 3, "max_buffer_length": self.total // 2,
        } | self.info  # fmt: skip

    def metal_info(self) -> Mapping[str, Any]:
        return self.device_info()

    def device_bytes(self) -> tuple[int, int]:
        return self.own, self.cached


COUNTERS: tuple[str, ...] = ("pageins", "pageouts", "decompressions", "compressions", "swapins", "swapouts")
