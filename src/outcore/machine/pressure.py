"""What the system reports about memory pressure: room left, paging, stalls, control group events, macOS's own level.

One reading is plain numbers; counters run from some time before this process began, so only differences between two
readings say anything. What to do about them is the governor's. Files are read below a `root`, so that tests can stand
up any machine in a folder.

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

from .mac_memory import mac_memory, pressure_level
from .memory import MemoryLimit, cgroup_folders, fields_of, memory_limits, text_of
from .memory_calls import MemoryCalls

PAGE = 4096
"""Bytes of a page as ``Pressure`` counts them; those of Apple silicon are four times as large."""


@dataclass(frozen=True)
class Pressure:
    """One reading. None stands for what this system does not tell.

    Attributes:
        limits: every limit on this process's memory; never empty.
        swap_ins, swap_outs: pages of the whole machine, of ``PAGE`` bytes.
        decompressions: such pages too, on macOS: memory that was compressed and is needed again.
        major_faults: of this process: page faults that had to wait for a disk. Reads into a slot are none.
        some_us, full_us: microseconds in which at least one task, or every task, waited for memory: of the control
            group where it counts them, else of the machine.
        oom, oom_kill: how often the control groups had nothing left to free, and how often a process was ended. A group
            that page cache fills reaches its limit all the time, which is no distress and not read.
        under_oom: tasks of the group are waiting for memory that is not there (v1).
        macos_level: 1 normal, 2 warning, 4 critical.
        warning_room: bytes that can be wired before macOS warns, as ``MacMemory`` has it.
        alarms: what a ``GroupAlarm`` has counted.
    """

    limits: tuple[MemoryLimit, ...]
    swap_ins: int | None = None
    swap_outs: int | None = None
    decompressions: int | None = None
    major_faults: int = 0
    some_us: int | None = None
    full_us: int | None = None
    oom: int = 0
    oom_kill: int = 0
    under_oom: bool = False
    macos_level: int | None = None
    warning_room: int | None = None
    alarms: int | None = None

    def told(self) -> list[str]:
        """Names of what this system tells; the limits first."""
        named = {
            "swap-ins": self.swap_ins,
            "swap-outs": self.swap_outs,
            "decompressions": self.decompressions,
            "major page faults": self.major_faults,
            "stalls (some)": self.some_us,
            "stalls (full)": self.full_us,
            "macOS's pressure level": self.macos_level,
            "bytes until macOS warns": self.warning_room,
            "control group's refusals": self.alarms,
        }
        return [*(x.source for x in self.limits), *(name for name, value in named.items() if value is not None)]


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
            self._count = 0
        except OSError:
            self.close()

    def count(self) -> int | None:
        """Alarms so far; None where the kernel gives none."""
        if self._count is not None and self._files and sys.platform.startswith("linux"):
            with contextlib.suppress(BlockingIOError):
                self._count += os.eventfd_read(self._files[0])
        return self._count

    def close(self) -> None:
        """Listen no more. Safe to call twice."""
        while self._files:
            os.close(self._files.pop())


def read_pressure(
    root: Path = Path("/"), *, device: bool = True, alarm: GroupAlarm | None = None, calls: MemoryCalls | None = None
) -> Pressure:
    """What the system reports now. 0.8 ms on Linux: fit for once a second and between passes.

    Args:
        device: the GPU's memory is asked for too.
        alarm: is asked for its count.
        calls: what macOS and MLX are asked by; the system's own by default.
    """
    folders = list(cgroup_folders(root))
    mac, vmstat = mac_memory(calls), fields_of(root / "proc/vmstat")
    # Of the nearest group that counts them, else of the machine.
    files = [folder / "memory.pressure" for version, folder in folders if version == 2]
    stalls = next(filter(None, map(text_of, [*files, root / "proc/pressure/memory"])), "")
    oom, oom_kill, under_oom = _events(folders)
    return Pressure(
        limits=memory_limits(root, device=device, calls=calls, mac=mac),
        # Not psutil's: on macOS that counts pages of mapped files too.
        swap_ins=vmstat.get("pswpin") if mac is None else mac.pages.swapins * mac.page // PAGE,
        swap_outs=vmstat.get("pswpout") if mac is None else mac.pages.swapouts * mac.page // PAGE,
        decompressions=None if mac is None else mac.pages.decompressions * mac.page // PAGE,
        major_faults=resource.getrusage(resource.RUSAGE_SELF).ru_majflt,
        some_us=_stalled(stalls, "some"),
        full_us=_stalled(stalls, "full"),
        oom=oom,
        oom_kill=oom_kill,
        under_oom=under_oom,
        macos_level=pressure_level(calls),
        warning_room=None if mac is None else mac.warning_room,
        alarms=alarm.count() if alarm is not None else None,
    )


def _stalled(text: str, kind: str) -> int | None:
    match = re.search(rf"^{kind} avg10=[0-9.]+ .*total=([0-9]+)", text, re.MULTILINE)
    return int(match[1]) if match else None


def _events(folders: Sequence[tuple[int, Path]]) -> tuple[int, int, bool]:
    """How often the groups ran out of memory, the processes ended in this one, and whether tasks wait for memory."""
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
        else:
            counts = fields_of(folder / "memory.oom_control")
            under_oom = under_oom or bool(counts.get("under_oom"))
        killed += counts.get("oom_kill", 0) if first else 0
    return oom, killed, under_oom
