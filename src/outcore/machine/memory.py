"""Memory of the machine, the control group, this process and the GPU, and the system's signs of memory pressure.

A limit gives its total and what is available now. Page cache counts as available, since the kernel releases it. Files
are read below ``root``, so that tests can imitate any machine.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import resource
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import psutil  # type: ignore[import-untyped]

from . import mac
from .settings import SHARED_BY

# default_budget leaves the rest for other programs, for the page cache of buffered reads, and for what the budget does
# not count (MLX's kernels, thread stacks, malloc's slack). A limit of this process alone needs less reserve.
OWN_SHARE, COMMON_SHARE = 0.9, 0.8
# Python, MLX, mlx-lm and a tokenizer of 150,000 words: 180 MB resident on Linux, MLX 0.32.4.
PROCESS_BYTES = 200_000_000
_LEAST_RESERVE = 64_000_000  # for growth, even where the process is already that large
_UNLIMITED = 2**60  # cgroup v1 writes "no limit" as 2**63 less a page


@dataclass(frozen=True)
class MemoryLimit:
    """One limit on this process's memory, in bytes.

    Attributes:
        total: the most that it allows.
        available: what can still be allocated, from 0 to `total`.
        source: name for the user: `machine`, `/sys/fs/cgroup/app/memory.max`, `RLIMIT_AS`, `Metal`.
        common: shared with other programs.
    """

    total: int
    available: int
    source: str
    common: bool = False


def process_memory_limit(root: Path = Path("/")) -> MemoryLimit:
    """Returns the limit with the least available; of equals, the smaller total."""
    return min(memory_limits(root), key=lambda limit: (limit.available, limit.total))


def memory_limits(root: Path = Path("/")) -> tuple[MemoryLimit, ...]:
    """Returns every limit on this process, the machine's memory first.

    On a Mac, half of the inactive memory counts as available, since macOS has to compress it first.
    """
    found = psutil.virtual_memory()
    available = found.available if mac.pressure_level() is None else found.free + found.inactive // 2
    machine = _limit(found.total, found.total - available, "machine", common=True)
    return (machine, *cgroup_limits(root), *rlimits(root), *device_limits())


def warning_room() -> int | None:
    """Returns bytes that can be wired before macOS warns of memory pressure; None on other systems.

    xnu warns where active, inactive and free pages are fewer than compressed ones, and until they exceed them by half
    (``VM_PRESSURE_NORMAL_TO_WARNING``, osfmk/vm/vm_pageout.c, xnu-11417). Wiring pages, as a GPU does with weights,
    reduces the former. psutil does not report compressed pages, so they are computed as the remainder.
    """
    if mac.pressure_level() is None:
        return None
    found = psutil.virtual_memory()
    unwired = found.active + found.inactive + found.free
    return max(0, int(2 * unwired - (found.total - found.wired)))


def default_budget(limit: MemoryLimit | None = None) -> int:
    """Returns the default budget in bytes: a safe share of available memory, less what Python will still take.

    `share * available - max(_LEAST_RESERVE, PROCESS_BYTES - rss)`, at least 0. On macOS, at most what can be wired
    before a memory pressure warning but at least half of the former, since a warning stops nothing; 0 at critical
    pressure. Ranks on one host divide it.

    Args:
        limit: this process's by default.
    """
    level, room = (mac.pressure_level(), warning_room()) if limit is None else (None, None)
    limit = limit or process_memory_limit()
    share = COMMON_SHARE if limit.common else OWN_SHARE
    reserve = max(_LEAST_RESERVE, PROCESS_BYTES - rss())
    budget = max(0, int(share / shared_by() * limit.available) - reserve)
    if level == mac.CRITICAL:
        return 0
    return budget if room is None else min(budget, max(room // shared_by(), budget // 2))


def last_resort(limit: MemoryLimit | None = None) -> int:
    """Returns bytes that may be planned with where `default_budget` is too small for a model to run at all."""
    limit = limit or process_memory_limit()
    return max(0, limit.available // shared_by() - _LEAST_RESERVE)


def shared_by() -> int:
    """Returns how many ranks divide this host's memory."""
    found = os.environ.get(SHARED_BY, "1")
    return max(1, int(found)) if found.isdecimal() and len(found) < 6 else 1


def rss() -> int:
    """Returns resident bytes of this process, shared libraries and mapped files included."""
    return int(psutil.Process().memory_info().rss)


def peak_rss(root: Path = Path("/")) -> int:
    """Returns the most bytes of this process that were ever resident.

    On Linux from VmHWM, since getrusage inherits the parent's peak (measured: under a parent of 500 MB a fresh Python
    reports 500 MB, VmHWM 9 MB).
    """
    status = fields_of(root / "proc/self/status")
    if "VmHWM" in status:
        return status["VmHWM"] * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # getrusage(2): bytes on macOS, KiB elsewhere


def share_one_heap() -> None:
    """Makes new threads allocate from one glibc heap, since ``free_heap`` cannot shrink others (mallopt(3),
    malloc_trim(3))."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(-8, 1)  # M_ARENA_MAX, malloc.h


def free_heap() -> None:
    """Returns freed memory to the system, which Python and the C library would keep."""
    gc.collect()
    with suppress(AttributeError, OSError):  # glibc alone has it
        ctypes.CDLL(None).malloc_trim(0)


def device_limits() -> tuple[MemoryLimit, ...]:
    """Returns the memory limit of MLX's default device: Metal's working set, or a CUDA card's memory."""
    info, held, cached = mx.device_info(), mx.get_active_memory(), mx.get_cache_memory()
    if mx.metal.is_available() and (total := int(info.get("max_recommended_working_set_size", 0))):
        # MLX reports the value at the process's start; the user may have lowered it since.
        total = min(total, mac.wired_limit() or total)
        return (_limit(total, held + cached, "Metal working set", common=True),)
    # MLX's device.h: free_memory exists only on CUDA. MLX's own cache can be used again.
    if "free_memory" in info and (total := int(info.get("total_memory", 0) or info.get("memory_size", 0))):
        used = total - int(info["free_memory"]) - cached
        return (_limit(total, used, f"CUDA memory of {info.get('device_name', 'the GPU')}", common=True),)
    return ()


def rlimits(root: Path = Path("/")) -> tuple[MemoryLimit, ...]:
    """Returns the soft RLIMIT_AS and RLIMIT_DATA where they are set and enforced: on Linux, see getrlimit(2)."""
    status = fields_of(root / "proc/self/status")
    limits = text_of(root / "proc/self/limits")
    found = []
    for label, counted, name in (("address space", "VmSize", "RLIMIT_AS"), ("data size", "VmData", "RLIMIT_DATA")):
        if soft := re.search(rf"^Max {label} +([0-9]+) ", limits, re.MULTILINE):
            found.append(_limit(int(soft[1]), status.get(counted, 0) * 1024, name))
    return tuple(found)


def cgroup_limits(root: Path = Path("/")) -> tuple[MemoryLimit, ...]:
    """Returns memory limits of this process's control groups (v1 and v2) and their visible parents.

    https://docs.kernel.org/admin-guide/cgroup-v2.html, https://docs.kernel.org/admin-guide/cgroup-v1/memory.html
    """
    found = []
    for version, folder in cgroup_folders(root):
        shown, stat = "/" + folder.relative_to(root).as_posix(), fields_of(folder / "memory.stat")
        used = _number_in(folder / ("memory.current" if version == 2 else "memory.usage_in_bytes"))
        if used is None:  # the root group, or one without the memory controller
            continue
        total_ = "" if version == 2 else "total_"
        used -= stat.get(f"{total_}inactive_file", 0) + stat.get(f"{total_}active_file", 0)
        # Beyond memory.high the kernel throttles processes. Limits of groups above a v1 mount are visible, the groups
        # are not.
        names = ("memory.max", "memory.high") if version == 2 else ("memory.limit_in_bytes",)
        totals = [(_number_in(folder / name), name) for name in names]
        if (above := stat.get("hierarchical_memory_limit")) is not None and above < (totals[0][0] or 0):
            totals.append((above, "memory.stat hierarchical_memory_limit"))
        found += [_limit(n, used, f"{shown}/{name}") for n, name in totals if n is not None and n < _UNLIMITED]
    return tuple(found)


def cgroup_folders(root: Path = Path("/")) -> Iterator[tuple[int, Path]]:
    """Yields version and folder of this process's memory groups, each followed by its visible parents."""
    groups = {}
    for line in text_of(root / "proc/self/cgroup").splitlines():  # id:controllers:path
        number, controllers, path = (*line.split(":", 2), "", "")[:3]
        if (number == "0" and not controllers) or "memory" in controllers.split(","):
            groups[1 if controllers else 2] = path
    for line in text_of(root / "proc/self/mountinfo").splitlines():  # proc(5)
        mount, _, kind = line.partition(" - ")
        fields, kinds = mount.split(), kind.split()
        if len(fields) < 5 or len(kinds) < 3:
            continue
        version = 2 if kinds[0] == "cgroup2" else 1 if kinds[0] == "cgroup" and "memory" in kinds[2].split(",") else 0
        if version in groups:
            # Spaces in paths are written as octal escapes.
            shown, point = (re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), f) for f in fields[3:5])
            # In a container the mount may show only the subtree at this process's group.
            prefix, group = shown.rstrip("/") + "/", groups[version]
            inside = group[len(prefix) :] if (group + "/").startswith(prefix) else ""
            parts = [] if ".." in inside.split("/") else [part for part in inside.split("/") if part]
            for depth in range(len(parts), -1, -1):
                yield version, (root / point.lstrip("/")).joinpath(*parts[:depth])


def _limit(total: int, used: int, source: str, common: bool = False) -> MemoryLimit:
    return MemoryLimit(total, min(total, max(0, total - used)), source, common)


def text_of(path: Path) -> str:
    """Returns the file's text; empty where it is missing or unreadable."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _number_in(path: Path) -> int | None:
    text = text_of(path).strip()
    return int(text) if text.isdecimal() else None  # v2 writes "max" for no limit


def fields_of(path: Path) -> dict[str, int]:
    """Parses `key value` and `Key:  value kB` lines, as in memory.stat and /proc/self/status; skips others."""
    return {key: int(number) for key, number in re.findall(r"(?m)^(\w[^\s:]*):?\s+(\d+)(?!\S)", text_of(path))}


@dataclass(frozen=True)
class Pressure:
    """One reading of free memory, paging, control group events and macOS's level. None: not reported by this system.

    Counters started before this process, so only differences of two readings mean anything.

    https://docs.kernel.org/admin-guide/cgroup-v2.html (memory.events),
    https://docs.kernel.org/admin-guide/cgroup-v1/memory.html (memory.oom_control)

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
        macos_level=mac.pressure_level(),
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
