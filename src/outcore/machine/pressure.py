"""What the system reports about memory pressure: room left, paging, stalls, control group events, macOS's own level.

One reading is plain numbers; counters run from some time before this process began, so only differences between two
readings say anything. What to do about them is `governor`'s. Files are read below a `root`, so that tests can stand up
any machine in a folder.

https://docs.kernel.org/accounting/psi.html, https://docs.kernel.org/admin-guide/cgroup-v2.html (memory.events,
memory.pressure), https://docs.kernel.org/admin-guide/cgroup-v1/memory.html (memory.oom_control)
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .mac_memory import MacMemory, mac_memory, pressure_level
from .memory import MemoryLimit, cgroup_folders, fields_of, memory_limits, text_of
from .memory_calls import MemoryCalls

PAGE = 4096
"""Bytes of a page as ``Pressure`` counts them; those of Apple silicon are four times as large."""


@dataclass(frozen=True)
class Stall:
    """Pressure stall information: the time in which tasks waited for memory.

    Attributes:
        avg10: percent of the last ten seconds.
        total_us: microseconds since the system, or the group, began.
    """

    avg10: float = 0.0
    total_us: int = 0


@dataclass(frozen=True)
class GroupEvents:
    """What has happened in this process's control groups so far: counters, but for ``under_oom``.

    A group that page cache fills reaches its limit all the time: ``high``, ``max`` and memory.failcnt are no distress,
    and not read. ``oom`` is: nothing could be freed.

    Attributes:
        oom, oom_kill: memory.events of v2; ``oom_kill`` of memory.oom_control of v1 too.
        under_oom: v1: tasks of the group are waiting for memory that is not there.
    """

    oom: int = 0
    oom_kill: int = 0
    under_oom: bool = False


@dataclass(frozen=True)
class Pressure:
    """One reading. None stands for what this system does not tell.

    Attributes:
        limits: every limit on this process's memory; never empty.
        swap_ins, swap_outs: pages of the whole machine, of ``PAGE`` bytes.
        decompressions: such pages too, on macOS: memory that was compressed and is needed again.
        major_faults: of this process: page faults that had to wait for a disk. Reads into a slot are none.
        some, full: time in which at least one task, or every task, waited for memory: of the control group where it
            counts them, else of the machine.
        events: of the control groups.
        macos_level: 1 normal, 2 warning, 4 critical.
        warning_room: bytes that can be wired before macOS warns, as ``MacMemory`` has it.
        alarms: what a ``GroupAlarm`` has counted.
    """

    limits: tuple[MemoryLimit, ...]
    swap_ins: int | None = None
    swap_outs: int | None = None
    major_faults: int = 0
    some: Stall | None = None
    full: Stall | None = None
    events: GroupEvents = GroupEvents()
    macos_level: int | None = None
    alarms: int | None = None
    decompressions: int | None = None
    warning_room: int | None = None


class GroupAlarm:
    """Counts how often the kernel found nothing to free in this process's control group (v1).

    A limit that is lowered below what a v1 group holds is refused (EBUSY) and changes nothing that can be read; but the
    kernel has looked for memory to free, in vain, and says so to who listens at memory.pressure_level: ``critical``, at
    each try (measured on Linux 6.18; not once in 30 GB of cached reads through a full group). That takes the right to
    write cgroup.event_control; where it is missing nothing is counted. Linux calls the file deprecated.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._files: list[int] = []
        self._count: int | None = None
        own = next((folder for version, folder in cgroup_folders(root) if version == 1), None)
        if own is None or not sys.platform.startswith("linux"):
            return
        try:
            self._files.append(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
            self._files.append(os.open(own / "memory.pressure_level", os.O_RDONLY | os.O_CLOEXEC))
            (own / "cgroup.event_control").write_text(f"{self._files[0]} {self._files[1]} critical")
        except OSError:
            self.close()
        else:
            self._count = 0

    def count(self) -> int | None:
        """Alarms so far; None where the kernel gives none."""
        if self._count is not None and self._files and sys.platform.startswith("linux"):
            with contextlib.suppress(BlockingIOError):
                self._count += os.eventfd_read(self._files[0])
        return self._count

    def close(self) -> None:
        """Listen no more. Safe to call twice."""
        for file in self._files:
            os.close(file)
        self._files.clear()


@dataclass(frozen=True)
class Signal:
    """One thing that tells of memory pressure, for who asks what this machine tells.

    Attributes:
        name: of what is read, as the system calls it.
        value: what it says now; None: it cannot be read here.
    """

    name: str
    value: str | None

    @property
    def readable(self) -> bool:
        return self.value is not None


def read_pressure(
    root: Path = Path("/"),
    *,
    device: bool = True,
    alarm: GroupAlarm | None = None,
    calls: MemoryCalls | None = None,
) -> Pressure:
    """What the system reports now. 0.8 ms on Linux: fit for once a second and between sweeps.

    Args:
        device: the GPU's memory is asked for too.
        alarm: is asked for its count.
        calls: what macOS and MLX are asked by; the system's own by default.
    """
    folders = list(cgroup_folders(root))
    mac = mac_memory(calls)
    swap_ins, swap_outs = _swapped(root) if mac is None else _mac_swapped(mac)
    some, full = _stalls(root, folders)
    return Pressure(
        limits=memory_limits(root, device=device, calls=calls, mac=mac),
        swap_ins=swap_ins,
        swap_outs=swap_outs,
        major_faults=_major_faults(root),
        some=some,
        full=full,
        events=_events(folders),
        macos_level=pressure_level(calls),
        alarms=alarm.count() if alarm is not None else None,
        decompressions=None if mac is None else mac.pages.decompressions * mac.page // PAGE,
        warning_room=None if mac is None else mac.warning_room,
    )


def pressure_signals(
    root: Path = Path("/"), *, alarm: GroupAlarm | None = None, calls: MemoryCalls | None = None
) -> tuple[Signal, ...]:
    """Everything that a reading goes by, and whether this machine tells it; the limits first."""
    read = read_pressure(root, alarm=alarm, calls=calls)
    limits = (Signal(x.source, f"{x.available} of {x.total} bytes left") for x in read.limits)
    told = {
        "swap-ins": read.swap_ins,
        "swap-outs": read.swap_outs,
        "decompressions": read.decompressions,
        "major page faults": read.major_faults,
        "stalls (some)": None if read.some is None else f"{read.some.avg10:g} %",
        "stalls (full)": None if read.full is None else f"{read.full.avg10:g} %",
        "macOS's pressure level": read.macos_level,
        "bytes until macOS warns": read.warning_room,
        "control group's refusals": read.alarms,
    }
    return (*limits, *(Signal(name, None if value is None else str(value)) for name, value in told.items()))


def _swapped(root: Path) -> tuple[int | None, int | None]:
    """Pages swapped in and out. Not psutil's: on macOS that counts pages of mapped files too."""
    text = text_of(root / "proc/vmstat")
    found = [re.search(rf"^{name} ([0-9]+)$", text, re.MULTILINE) for name in ("pswpin", "pswpout")]
    ins, outs = (int(m[1]) if m else None for m in found)
    return ins, outs


def _mac_swapped(mac: MacMemory) -> tuple[int, int]:
    """The compressor's pages that came from the disk and went there."""
    pages = mac.pages
    return pages.swapins * mac.page // PAGE, pages.swapouts * mac.page // PAGE


def _major_faults(root: Path) -> int:
    # proc(5): field 12, and the second is a name in brackets that may hold anything.
    fields = text_of(root / "proc/self/stat").rpartition(")")[2].split()
    if len(fields) > 9 and fields[9].isdecimal():
        return int(fields[9])
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


def _stalls(root: Path, folders: Sequence[tuple[int, Path]]) -> tuple[Stall | None, Stall | None]:
    """Of the nearest group that counts them, else of the machine."""
    files = [folder / "memory.pressure" for version, folder in folders if version == 2]
    text = next(filter(None, map(text_of, [*files, root / "proc/pressure/memory"])), "")
    return _stall(text, "some"), _stall(text, "full")


def _stall(text: str, kind: str) -> Stall | None:
    match = re.search(rf"^{kind} avg10=([0-9.]+) .*total=([0-9]+)", text, re.MULTILINE)
    return Stall(float(match[1]), int(match[2])) if match else None


def _events(folders: Sequence[tuple[int, Path]]) -> GroupEvents:
    oom = killed = 0
    under_oom = False
    own: set[int] = set()  # versions of which the process's own group has been seen
    for version, folder in folders:
        first = version not in own
        own.add(version)
        if version == 2:
            # A limit of a group above counts there; in its memory.events neighbours' misfortunes do too.
            counts = fields_of(folder / "memory.events.local")
            if not counts and first:
                counts = fields_of(folder / "memory.events")
            oom += counts.get("oom", 0)
            killed += counts.get("oom_kill", 0) if first else 0
        else:
            control = fields_of(folder / "memory.oom_control")
            under_oom = under_oom or bool(control.get("under_oom"))
            killed += control.get("oom_kill", 0) if first else 0
    return GroupEvents(oom, killed, under_oom)
