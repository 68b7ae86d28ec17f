"""What a Mac tells of its memory, and what is made of it: on a pretended one. None of this has run on a Mac."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fake_darwin_memory import GB, PAGE, FakeDarwin
from outcore.machine import hardware, memory, memory_calls
from outcore.machine.budget import asked_budget
from outcore.machine.mac_memory import MacMemory, mac_memory, pressure_level, wired_limit
from outcore.machine.memory import MemoryLimit
from outcore.machine.memory_calls import MemoryCalls, VmStatistics
from outcore.machine.pressure import read_pressure

GIB = 2**30


# What is asked, down to the bytes


class Library:
    """libSystem as ctypes would find it."""

    def __init__(self, values: dict[bytes, bytes], status: int = 0, count: int = 38) -> None:
        self.values, self.status, self.count = values, status, count
        self.ports = 0

    def sysctlbyname(self, name: bytes, value: Any, size: Any, new: None, new_size: Any) -> int:
        assert new is None and new_size.value == 0
        if name not in self.values or len(self.values[name]) > size._obj.value:
            return -1
        size._obj.value = len(self.values[name])
        ctypes.memmove(value, self.values[name], size._obj.value)
        return self.status

    def mach_host_self(self) -> int:
        self.ports += 1
        return 0x1503

    def host_statistics64(self, host: Any, flavor: int, info: Any, count: Any) -> int:
        assert (host.value, flavor, count._obj.value) == (0x1503, 4, 38)
        # struct vm_statistics64 in xnu's osfmk/mach/vm_statistics.h, as a C compiler lays it out.
        words = [*range(1, 5)]
        for wide in range(5, 14):
            words += [wide, 0]
        words += [14, 15]
        for wide in range(16, 20):
            words += [wide, 0]
        words += [*range(20, 24), 24, 0]
        assert len(words) == 38
        ctypes.memmove(info._obj and ctypes.addressof(info._obj), (ctypes.c_uint32 * 38)(*words), 152)
        count._obj.value = self.count
        return self.status


def number(value: int, size: int = 4) -> bytes:
    return value.to_bytes(size, sys.byteorder)


def test_sysctl_gives_numbers_of_both_sizes_and_texts() -> None:
    calls = MemoryCalls(Library({b"a": number(7), b"b": number(1 << 34, 8), b"c": b"Apple M4 Max\0", b"d": b"abc"}))
    assert [calls.number(n) for n in "abcd"] == [7, 1 << 34, None, None]
    assert [calls.text(n) for n in ("c", "none")] == ["Apple M4 Max", ""]
    assert calls.number("none") is None
    assert MemoryCalls(Library({b"a": number(7)}, status=-1)).sysctl("a") is None


def test_statistics_are_read_where_xnu_puts_them() -> None:
    library = Library({})
    calls = MemoryCalls(library)
    read = calls.vm_statistics()
    names = ("free", "active", "inactive", "purgeable", "speculative", "decompressions", "swapins", "swapouts")
    assert [getattr(read, name) for name in names] == [1, 2, 3, 14, 15, 16, 18, 19]
    assert read is not None and (read.compressor, read.external) == (20, 22) and calls.vm_statistics() is not None
    assert library.ports == 1, "each would be another right to the port"
    assert MemoryCalls(Library({}, status=5)).vm_statistics() is None
    assert MemoryCalls(Library({}, count=24)).vm_statistics() is None, "a kernel that knows no compressor"


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS tells")
def test_elsewhere_nothing_of_macos_is_told() -> None:
    calls = MemoryCalls()
    assert calls.sysctl("hw.memsize") is None and calls.vm_statistics() is None
    assert mac_memory() is None and pressure_level() is None and wired_limit() is None
    assert read_pressure().macos_level is None and read_pressure().warning_room is None


def test_the_level_is_what_the_kernel_says() -> None:
    def level(told: int) -> int | None:
        return pressure_level(MemoryCalls(Library({b"kern.memorystatus_vm_pressure_level": number(told)})))

    assert [level(n) for n in (1, 2, 4, 3, 0)] == [1, 2, 4, None, None]


# What is made of it


def test_what_can_be_had_counts_no_page_twice_and_no_code_that_runs() -> None:
    numbers = {"free": 100, "active": 400, "inactive": 300, "purgeable": 10, "speculative": 40, "external": 240}

    def of(**changes: int) -> MacMemory:
        return MacMemory(10_000 * PAGE, VmStatistics(**(numbers | {"compressor": 50} | changes)), PAGE)

    mac = of()
    assert mac.uncompressed == (100 + 10 + 200) * PAGE
    assert mac.available == mac.uncompressed + (300 - 200 - 10) // 2 * PAGE
    assert mac.warning_room == (100 + 400 + 300 - 50) * PAGE
    # More of files than there is inactive: the rest is in use.
    busy = of(external=640)
    assert busy.uncompressed == busy.available == (100 + 10 + 300) * PAGE
    assert of(compressor=900).warning_room == 0


@pytest.mark.parametrize("missing", ["statistics", "hw.memsize", "hw.pagesize"])
def test_a_mac_that_does_not_tell_is_read_by_psutil(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mac = FakeDarwin()
    if missing == "statistics":
        monkeypatch.setattr(mac, "vm_statistics", lambda: None)
    else:
        told = mac.sysctl
        monkeypatch.setattr(mac, "sysctl", lambda name: None if name == missing else told(name))
    monkeypatch.setattr(mac, "machine", lambda: (16 * GB, 5 * GB))
    assert mac_memory(mac) is None
    assert memory.memory_limits(Path("/nowhere"), calls=mac)[0] == MemoryLimit(16 * GB, 5 * GB, "machine", common=True)


def test_the_machines_limit_knows_the_compressor(tmp_path: Path) -> None:
    mac = FakeDarwin(total=16 * GIB, wired=2 * GB, idle=3 * GB, busy=2 * GB, files=3 * GB, compressed=3 * GB)
    free = 16 * GIB - 2 * GB - 3 * GB - 2 * GB - 3 * GB - 1 * GB
    machine, metal = memory.memory_limits(tmp_path, calls=mac)
    assert machine.total == 16 * GIB and machine.common
    assert machine.available == pytest.approx(free + 3 * GB + 1.5 * GB, abs=8 * PAGE)  # half of what is idle
    assert (metal.total, metal.source) == (16 * GIB * 2 // 3, "Metal working set")


def test_a_limit_that_the_user_set_for_the_gpu_counts_where_it_is_less(tmp_path: Path) -> None:
    mac = FakeDarwin(own=2 * GB)
    mac.cached = GB
    for megabytes, total in ((0, 16 * GIB * 2 // 3), (4096, 4 * GIB), (15_000, 16 * GIB * 2 // 3)):
        mac.names["iogpu.wired_limit_mb"] = number(megabytes)
        (limit,) = memory.device_limits(mac)
        assert (limit.total, limit.available) == (total, total - 3 * GB)


def budget_of(mac: FakeDarwin, profile: str = "balanced") -> int:
    return memory.default_budget(profile=profile, calls=mac)


def test_the_default_budget_compresses_nothing_and_stays_off_the_warning() -> None:
    reserve = 100_000_000  # 64 MB to 200 MB, by what this process takes already
    # Half empty: the working set is more than what is free.
    idle = FakeDarwin(total=16 * GIB, wired=2 * GB, idle=4 * GB, busy=2 * GB, files=1 * GB, compressed=0)
    free = 16 * GIB - 9 * GB + 1 * GB
    assert 0.8 * free - 2 * reserve < budget_of(idle) < 0.8 * free - 0.5 * reserve
    # Almost all free: the working set is what there is.
    empty = FakeDarwin(total=16 * GIB, wired=GB, idle=0, busy=GB, files=0, compressed=0)
    assert 0.8 * 16 * GIB * 2 / 3 - 2 * reserve < budget_of(empty) < 0.8 * 16 * GIB * 2 / 3
    assert budget_of(empty, "safety") < budget_of(empty) < budget_of(empty, "performance")
    # Free, but the compressor holds nearly as much as is not wired: macOS would warn.
    near = FakeDarwin(total=16 * GIB, wired=4 * GB, idle=GB, busy=GB, files=4 * GB, compressed=15 * GB)
    assert near.level == 1
    room = near.unwired - near.compressor
    assert budget_of(near) == pytest.approx(room, abs=8 * PAGE) and room < 0.8 * (near.free + 4 * GB) - 2 * reserve
    mac = mac_memory(near)
    assert mac is not None and mac.warning_room == pytest.approx(room, abs=8 * PAGE)


def test_at_a_warning_half_remains_and_when_it_is_critical_nothing() -> None:
    mac = FakeDarwin(wired=7 * GB, idle=GB, busy=GB, files=2 * GB, compressed=16 * GB, compressor_most=9 * GB)
    assert mac.level == 2 and mac.unwired < mac.compressor
    whole = 0.8 * (mac.free + mac.files)
    assert 0.4 * (mac.free + mac.files) - 100_000_000 <= budget_of(mac) <= whole / 2
    mac.told = 4
    assert budget_of(mac) == 0
    assert memory.last_resort(memory.process_memory_limit(calls=mac)) > GB, "there is room for the smallest plan"


def test_a_limit_that_is_given_is_taken_as_it_is() -> None:
    mac = FakeDarwin()
    mac.told = 4
    limit = MemoryLimit(20 * GB, 10 * GB, "made up")
    assert memory.default_budget(limit, calls=mac) == memory.default_budget(limit)


def test_a_reading_of_a_mac_has_swap_and_decompressions_in_pages_of_4_kib(tmp_path: Path) -> None:
    mac = FakeDarwin()
    mac.counters |= {"swapins": 10, "swapouts": 20, "decompressions": 30, "pageins": 99}
    read = read_pressure(tmp_path, calls=mac)
    assert (read.swap_ins, read.swap_outs, read.decompressions, read.macos_level) == (40, 80, 120, 1)
    assert read.warning_room == pytest.approx(mac.unwired - mac.compressor, abs=8 * PAGE)
    assert {limit.source for limit in read.limits} == {"machine", "Metal working set"}
    mac.told = 2
    assert read_pressure(tmp_path, calls=mac).macos_level == 2


def test_a_reading_asks_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mac, asked = FakeDarwin(), 0
    tell = mac.vm_statistics

    def count() -> VmStatistics | None:
        nonlocal asked
        asked += 1
        return tell()

    monkeypatch.setattr(mac, "vm_statistics", count)
    read_pressure(tmp_path, calls=mac)
    assert asked == 1, "xnu answers a few times a second, all programs together"


def test_the_systems_calls_are_asked_at_the_time_of_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    mac = FakeDarwin()
    monkeypatch.setattr(memory_calls, "SYSTEM", mac)
    assert read_pressure().macos_level == 1 and memory.memory_limits()[0].total == mac.total
    assert memory.process_memory_limit().source in {"machine", "Metal working set"}
    assert asked_budget("1GB") == GB


def test_every_signal_is_listed_where_it_can_be_read(tmp_path: Path) -> None:
    on_mac = read_pressure(tmp_path, calls=FakeDarwin()).told()
    assert on_mac[0] == "machine" and "stalls (some)" not in on_mac
    assert {"swap-outs", "decompressions", "macOS's pressure level", "bytes until macOS warns"} <= set(on_mac)
    if sys.platform == "linux":
        here = read_pressure().told()
        assert "major page faults" in here and "macOS's pressure level" not in here


# Names


def test_a_macs_processor_and_volume_have_their_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mac = FakeDarwin(names={"machdep.cpu.brand_string": b"Apple M2 Ultra\0"})
    assert hardware.cpu_name(mac) == "Apple M2 Ultra"
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
