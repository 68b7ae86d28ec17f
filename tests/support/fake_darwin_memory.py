"""A Mac's memory, for tests on any machine: what psutil, MLX and sysctl tell, from a few numbers and xnu's rules.

Pages are free, a file's, a program's own (idle or in use), compressed, or wired. Who takes memory gets free pages,
then those of files, then those that the compressor makes of idle programs' pages, then what it swaps out. The level
follows ``VM_PRESSURE_NORMAL_TO_WARNING`` and its neighbours in xnu's osfmk/vm/vm_pageout.c.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import psutil  # type: ignore[import-untyped]

from outcore.machine import hardware, memory
from outcore.machine.memory import Pressure, read_pressure

GB = 10**9
PAGE = 16384
RATIO = 3
"""Pages that the compressor makes one of."""


@dataclass
class FakeDarwin:
    """A Mac. Bytes.

    Attributes:
        wired: by the kernel; ``own``: by this process, weights that the GPU works on.
        idle, busy: memory of other programs that they leave alone, and that they work with.
        files: of the page cache. compressed: what the compressor's pages hold, uncompressed.
        compressor_most: bytes that the compressor keeps before it swaps out. swapped: bytes that it has.
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
    swapped: int = 0
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
        over = max(self.compressor - self.compressor_most, -self.free)
        if over > 0:
            self.compressed -= over * RATIO
            self.swapped += over
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

    # What is asked

    def sysctl(self, name: str) -> bytes | None:
        if name == "kern.memorystatus_vm_pressure_level":
            return (self.told or self.level).to_bytes(4, sys.byteorder)
        return self.names.get(name)

    def virtual_memory(self) -> SimpleNamespace:
        """As psutil tells it on macOS."""
        return SimpleNamespace(
            total=self.total, free=self.free, active=self.busy, inactive=self.idle + self.files,
            wired=self.wired + self.own, available=self.free + self.idle + self.files,
        )  # fmt: skip

    def device_info(self, _: Any = None) -> dict[str, Any]:
        return {
            "device_name": "Apple M4", "memory_size": self.total,
            "max_recommended_working_set_size": self.total * 2 // 3, "max_buffer_length": self.total // 2,
        } | self.info  # fmt: skip

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        """This machine is that Mac, as far as its memory goes."""
        with (
            patch.object(memory, "sysctl", self.sysctl),
            patch.object(hardware, "sysctl", self.sysctl),
            patch.object(psutil, "virtual_memory", self.virtual_memory),
            patch.object(mx.metal, "is_available", lambda: True),
            patch.object(mx, "device_info", self.device_info),
            patch.object(mx, "get_active_memory", lambda: self.own),
            patch.object(mx, "get_cache_memory", lambda: self.cached),
        ):
            yield

    def reading(self) -> Pressure:
        """What it tells now."""
        with self.here():
            return read_pressure(Path("/nowhere"))
