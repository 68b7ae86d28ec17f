"""What the system reports about memory pressure: room left, paging, stalls, control group events, macOS's own level.

One reading is plain numbers; counters run from some time before this process began, so only differences between two
readings say anything. What to do about them is the governor's. Files are read below a ``root``.

https://docs.kernel.org/accounting/psi.html, https://docs.kernel.org/admin-guide/cgroup-v2.html (memory.events,
memory.pressure), https://docs.kernel.org/admin-guide/cgroup-v1/memory.html (memory.oom_control)
"""

from __future__ import annotations

import re
import resource
from dataclasses import dataclass
from pathlib import Path

from .mac import pressure_level
from .memory import MemoryLimit, cgroup_folders, fields_of, memory_limits, text_of, warning_room


@dataclass(frozen=True)
class Pressure:
    """One reading. None stands for what this system does not tell.

    Attributes:
        limits: every limit on this process's memory; never empty.
        swap_ins: pages of the whole machine, of 4 KiB.
        major_faults: of this process: page faults that had to wait for a disk. Reads into a slot are none.
        some_us, full_us: microseconds in which at least one task, or every task, waited for memory: of the control
            group where it counts them, else of the machine.
        oom, oom_kill: how often the control groups had nothing left to free, and how often a process was ended. A group
            that page cache fills reaches its limit all the time, which is no distress and not read.
        under_oom: tasks of the group are waiting for memory that is not there (v1).
        macos_level: 1 normal, 2 warning, 4 critical.
        warning_room: bytes that can be wired before macOS warns.
    """

    limits: tuple[MemoryLimit, ...]
    swap_ins: int | None = None
    major_faults: int = 0
    some_us: int | None = None
    full_us: int | None = None
    oom: int = 0
    oom_kill: int = 0
    under_oom: bool = False
    macos_level: int | None = None
    warning_room: int | None = None


def read_pressure(root: Path = Path("/")) -> Pressure:
    """What the system reports now. 0.8 ms on Linux: fit for once a second and between passes."""
    folders = list(cgroup_folders(root))
    # Of the nearest group that counts them, else of the machine.
    files = [folder / "memory.pressure" for version, folder in folders if version == 2]
    stalls = next(filter(None, map(text_of, [*files, root / "proc/pressure/memory"])), "")
    stalled = {kind: int(us) for kind, us in re.findall(r"(?m)^(some|full) avg10=[0-9.]+ .*total=([0-9]+)", stalls)}
    oom, oom_kill, under_oom = _events(folders)
    return Pressure(
        limits=memory_limits(root),
        swap_ins=fields_of(root / "proc/vmstat").get("pswpin"),
        major_faults=resource.getrusage(resource.RUSAGE_SELF).ru_majflt,
        some_us=stalled.get("some"),
        full_us=stalled.get("full"),
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
