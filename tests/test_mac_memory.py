"""What a Mac tells of its memory, and what is made of it: on a pretended one. None of this has run on a Mac."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fake_darwin_memory import GB, FakeDarwin
from outcore.machine import hardware, memory
from outcore.machine.memory import MemoryLimit, read_pressure

GIB = 2**30


class Library:
    """libSystem as ctypes would find it."""

    def __init__(self, values: dict[bytes, bytes], status: int = 0) -> None:
        self.values, self.status = values, status

    def sysctlbyname(self, name: bytes, value: Any, size: Any, new: None, new_size: Any) -> int:
        assert new is None and new_size.value == 0
        if name not in self.values or len(self.values[name]) > size._obj.value:
            return -1
        size._obj.value = len(self.values[name])
        ctypes.memmove(value, self.values[name], size._obj.value)
        return self.status


def number(value: int, size: int = 4) -> bytes:
    return value.to_bytes(size, sys.byteorder)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[bytes, bytes]]:
    library = Library({})
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda _: library)
    return library.values  # type: ignore[return-value]


def test_sysctl_gives_numbers_of_both_sizes_and_texts(told: dict[bytes, bytes]) -> None:
    told[b"machdep.cpu.brand_string"] = b"Apple M4 Max\0"
    assert hardware.cpu_name() == "Apple M4 Max" and memory.wired_limit() is None
    for size in (4, 8):
        told[b"iogpu.wired_limit_mb"] = number(7, size)
        assert memory.wired_limit() == 7 << 20
    for level, known in ((1, 1), (2, 2), (4, 4), (3, None), (0, None)):
        told[b"kern.memorystatus_vm_pressure_level"] = number(level)
        assert memory.pressure_level() == known


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS tells")
def test_elsewhere_nothing_of_macos_is_reported() -> None:
    assert memory.sysctl("hw.memsize") is None
    assert memory.pressure_level() is None and memory.wired_limit() is None and memory.warning_room() is None
    assert read_pressure().macos_level is None and read_pressure().warning_room is None


# What is made of it


def test_half_of_a_macs_inactive_memory_counts_as_free(tmp_path: Path) -> None:
    fake = FakeDarwin(total=16 * GIB, wired=2 * GB, idle=3 * GB, busy=2 * GB, files=3 * GB, compressed=3 * GB)
    with fake.here():
        machine, metal = memory.memory_limits(tmp_path)
    assert machine == MemoryLimit(16 * GIB, fake.free + 3 * GB, "machine", common=True)
    assert (metal.total, metal.source) == (16 * GIB * 2 // 3, "Metal working set")


def test_a_limit_that_the_user_set_for_the_gpu_counts_where_it_is_less() -> None:
    fake = FakeDarwin(own=2 * GB, cached=GB)
    for megabytes, total in ((0, 16 * GIB * 2 // 3), (4096, 4 * GIB), (15_000, 16 * GIB * 2 // 3)):
        fake.names["iogpu.wired_limit_mb"] = number(megabytes)
        with fake.here():
            (limit,) = memory.device_limits()
        assert (limit.total, limit.available) == (total, total - 3 * GB)


def budget_of(fake: FakeDarwin) -> int:
    with fake.here():
        return memory.default_budget()


def test_the_default_budget_stays_off_the_warning() -> None:
    reserve = 100_000_000  # 64 MB to 200 MB, by what this process takes already
    # Half empty: the working set is more than what is free.
    idle = FakeDarwin(total=16 * GIB, wired=2 * GB, idle=4 * GB, busy=2 * GB, files=1 * GB, compressed=0)
    free = idle.free + 5 * GB // 2
    assert 0.8 * free - 2 * reserve < budget_of(idle) < 0.8 * free - 0.5 * reserve
    # Almost all free: the working set is what there is.
    empty = FakeDarwin(total=16 * GIB, wired=GB, idle=0, busy=GB, files=0, compressed=0)
    assert 0.8 * 16 * GIB * 2 / 3 - 2 * reserve < budget_of(empty) < 0.8 * 16 * GIB * 2 / 3
    # Free, but the compressor holds nearly as much as is not wired: macOS would warn.
    near = FakeDarwin(total=16 * GIB, wired=4 * GB, idle=GB, busy=GB, files=4 * GB, compressed=15 * GB)
    assert near.level == 1
    room = near.unwired - near.compressor
    assert near.reading().warning_room == room < 0.8 * (near.free + 5 * GB // 2) - 2 * reserve
    assert budget_of(near) == room


def test_at_a_warning_half_remains_and_when_it_is_critical_nothing() -> None:
    fake = FakeDarwin(wired=7 * GB, idle=GB, busy=GB, files=2 * GB, compressed=16 * GB, compressor_most=9 * GB)
    assert fake.level == 2 and fake.reading().warning_room == 0
    whole = 0.8 * (fake.free + (fake.idle + fake.files) // 2)
    assert whole / 2 - 100_000_000 <= budget_of(fake) <= whole / 2
    fake.told = 4
    assert budget_of(fake) == 0
    with fake.here():
        assert memory.last_resort() > GB // 2, "there is room for the smallest plan"
        limit = MemoryLimit(20 * GB, 10 * GB, "made up")
        assert memory.default_budget(limit) > 7 * GB, "a limit that is given is taken as it is"


def test_a_reading_of_a_mac_tells_its_level_and_room() -> None:
    fake = FakeDarwin()
    read = fake.reading()
    assert (read.swap_ins, read.macos_level, read.warning_room) == (None, 1, fake.unwired - fake.compressor)
    assert {limit.source for limit in read.limits} == {"machine", "Metal working set"}
    fake.told = 2
    assert fake.reading().macos_level == 2


def test_a_macs_volume_has_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    mounts = [("/dev/disk9s1", "/"), ("/dev/disk3s5", str(tmp_path))]
    found = [SimpleNamespace(device=device, mountpoint=point, fstype="apfs") for device, point in mounts]
    monkeypatch.setattr(hardware.psutil, "disk_partitions", lambda all: found)
    inside = tmp_path / "models"
    inside.mkdir()
    assert hardware._mounted_at(inside, inside.stat().st_dev) == "apfs on disk3s5"


@pytest.mark.skipif(sys.platform != "linux", reason="Linux's way")
def test_elsewhere_names_come_from_where_they_came_from(tmp_path: Path) -> None:
    text = Path("/proc/cpuinfo").read_text()
    models = [line for line in text.splitlines() if line.startswith("model name")]
    assert not models or hardware.cpu_name() == models[0].partition(":")[2].strip()
    assert " on " in hardware.filesystem(tmp_path)
