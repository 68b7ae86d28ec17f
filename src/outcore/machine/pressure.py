"""What the system reports about memory pressure: room left, paging, control group events, macOS's own level.

One reading is plain numbers; counters run from some time before this process began, so only differences between two
readings say anything. What to do about them is the governor's. Files are read below a ``root``.

https://docs.kernel.org/admin-guide/cgroup-v2.html (memory.events),
https://docs.kernel.org/admin-guide/cgroup-v1/memory.html (memory.oom_control)
"""

from __future__ import annotations

import resource
from dataclasses import dataclass
from pathlib import Path

from .mac import pressure_level
from .memory import MemoryLimit, cgroup_folders, fields_of, memory_limits, warning_room


@dataclass(frozen=True)
class Pressure:
    """One reading. None stands for what this system does not tell.

    Attributes:
        limits: every limit on this process's memory; never empty.
        swap_ins: pages of the whole machine, of 4 KiB.
        major_faults: of this process: page faults that had to wait for a disk. Reads into a slot are none.
        oom, oom_kill: how often the control groups had nothing left to free, and how often a process was ended. A group
            that page cache fills reaches its limit all the time, which is no distress and not read.
        under_oom: tasks of the group are waiting for memory that is not there (v1).
        macos_level: 1 normal, 2 warning, 4 critical.
        warning_room: bytes that can be wired before macOS warns.
    """

    limits: tuple[MemoryLimit, ...]
    swap_ins: int | None = None
    major_faults: int = 0
    oom: int = 0
    oom_kill: int = 0
    under_oom: bool = False
    macos_level: int | None = None
    warning_room: int | None = None


def read_pressure(root: Path = Path("/")) -> Pressure:
    """What the system reports now. 0.8 ms on Linux: fit for once a second and between passes."""
    folders = list(cgroup_folders(root))
    oom, oom_kill, under_oom = _events(folders)
    return Pressure(
        limits=memory_limits(root),
        swap_ins=fields_of(root / "proc/vmstat").get("pswpin"),
        major_faults=resource.getrusage(resource.RUSAGE_SELF).ru_majflt,
        oom=oom,
        oom_kill=oom_kill,
        under_oom=under_oom,
        macos_level=pressure_level(),
        warning_room=warning_room(),
    )


def _events(folders: list[tuple[int, Path]]) -> tuple[int, int, bool]:
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
