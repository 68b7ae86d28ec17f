"""Reads the system's signs of memory pressure: free memory, paging, control group events, macOS's level.

Counters started before this process, so only differences of two readings mean anything.

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
    """One reading. None: not reported by this system.

    Attributes:
        limits: every limit on this process's memory; never empty.
        swap_ins: pages of 4 KiB, of the whole machine.
        major_faults: page faults of this process that waited for a disk; reads into slots cause none.
        oom: how often the control groups could free no more memory.
        oom_kill: processes that the kernel killed for memory. How often groups reached their limit is not read: page
            cache alone fills them.
        under_oom: tasks of the group wait for memory (v1).
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
    """Reads the system's state; takes 0.8 ms on Linux."""
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
    """Returns out-of-memory events of the groups, processes killed in this one, and whether tasks wait for memory."""
    oom = killed = 0
    under_oom = False
    own: set[int] = set()  # versions whose own group was seen
    for version, folder in folders:
        first = version not in own
        own.add(version)
        if version == 2:
            # Counts events of the group's own limit; memory.events also counts those of its children.
            counts = fields_of(folder / "memory.events.local")
            if not counts and first:
                counts = fields_of(folder / "memory.events")
            oom += counts.get("oom", 0)
        else:
            counts = fields_of(folder / "memory.oom_control")
            under_oom = under_oom or bool(counts.get("under_oom"))
        killed += counts.get("oom_kill", 0) if first else 0
    return oom, killed, under_oom
