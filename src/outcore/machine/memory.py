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
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import mlx.core as mx
import psutil  # type: ignore[import-untyped]

from .settings import SHARED_BY

# Shares of available memory. ``default_budget`` leaves the rest for other programs, for the page cache, and for memory
# that a budget does not count (MLX's kernels, thread stacks, malloc's slack). ``OWN``: only this process has the limit.
OWN_SHARE, COMMON_SHARE = 0.9, 0.8
# Memory of Python, MLX, mlx-lm and a tokenizer of 150,000 words: 180 MB resident on Linux, MLX 0.32.4.
PROCESS_BYTES = 200_000_000
_LEAST_RESERVE = 64_000_000  # for growth of the process, even if it has ``PROCESS_BYTES`` already
_UNLIMITED = 2**60  # larger limits are none: cgroup v1 writes "no limit" as 2**63 less a page


# Memory pressure levels of macOS: NOTE_MEMORYSTATUS_PRESSURE_* in xnu's bsd/sys/event_private.h; 1 is normal.
WARNING, CRITICAL = 2, 4

_LONGEST = 256  # most bytes of a value of ``sysctl``; processors' names are shorter


@dataclass(frozen=True)
class MemoryLimit:
    """One limit on this process's memory, in bytes.

    Attributes:
        total: the most that it allows.
        available: what can still be allocated, from 0 to `total`.
        source: name for the user: `machine`, `/sys/fs/cgroup/app/memory.max`, `RLIMIT_AS`, `Metal`.
        common: whether other programs share it.
    """

    total: int
    available: int
    source: str
    common: bool = False


def process_memory_limit(root: Path = Path("/")) -> MemoryLimit:
    """Returns the limit with the fewest bytes available; of equal ones, that with the smaller total."""
    return min(memory_limits(root), key=lambda limit: (limit.available, limit.total))


def memory_limits(root: Path = Path("/"), folders: Sequence[tuple[int, Path]] | None = None) -> tuple[MemoryLimit, ...]:
    """Returns every limit on this process, the machine's memory first. ``folders``: as from ``cgroup_folders``.

    On a Mac, half of the inactive memory counts as available, since macOS has to compress it first.
    """
    found = psutil.virtual_memory()
    available = found.available if pressure_level() is None else found.free + found.inactive // 2
    machine = _limit(found.total, found.total - available, "machine", common=True)
    return (machine, *cgroup_limits(root, folders), *rlimits(root), *device_limits())


def warning_room() -> int | None:
    """Returns bytes that can be wired before macOS warns of memory pressure; None on other systems.

    xnu begins to warn when active, inactive and free pages together are fewer than compressed ones, and stops when they
    are half more (``VM_PRESSURE_NORMAL_TO_WARNING``, osfmk/vm/vm_pageout.c, xnu-11417). Wired pages, such as weights on
    the GPU, are none of these. psutil does not report compressed pages: they are all pages that it does not list.
    """
    if pressure_level() is None:
        return None
    found = psutil.virtual_memory()
    unwired = found.active + found.inactive + found.free
    return max(0, int(2 * unwired - (found.total - found.wired)))


def default_budget(limit: MemoryLimit | None = None) -> int:
    """Returns the default budget in bytes: a safe share of available memory, less what Python will still allocate.

    `share * available - max(_LEAST_RESERVE, PROCESS_BYTES - rss)`, at least 0. On macOS at most ``warning_room`` or
    half of this value, whichever is more, since a warning stops nothing; at critical pressure 0. Ranks on one host
    divide the available memory.

    Args:
        limit: the limit to keep; None: ``process_memory_limit()``.
    """
    level, room = (pressure_level(), warning_room()) if limit is None else (None, None)
    limit = limit or process_memory_limit()
    share = COMMON_SHARE if limit.common else OWN_SHARE
    reserve = max(_LEAST_RESERVE, PROCESS_BYTES - rss())
    budget = max(0, int(share / shared_by() * limit.available) - reserve)
    if level == CRITICAL:
        return 0
    return budget if room is None else min(budget, max(room // shared_by(), budget // 2))


def last_resort(limit: MemoryLimit | None = None) -> int:
    """Returns the largest budget in bytes to use for a model that does not run within `default_budget`."""
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
    """Returns the most bytes of this process that were resident at any time.

    Linux's value is VmHWM, since getrusage begins with the parent's peak (measured: in a new Python whose parent has
    500 MB, getrusage reports 500 MB, VmHWM 9 MB).
    """
    status = fields_of(root / "proc/self/status")
    if "VmHWM" in status:
        return status["VmHWM"] * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # getrusage(2): bytes on macOS, KiB elsewhere


def share_one_heap() -> None:
    """Makes new threads allocate from glibc's main heap, the only one that ``free_heap`` shrinks (mallopt(3),
    malloc_trim(3))."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(-8, 1)  # M_ARENA_MAX, malloc.h


def free_heap() -> None:
    """Returns freed memory to the system, which Python and the C library would keep."""
    gc.collect()
    with suppress(AttributeError, OSError):  # only glibc has ``malloc_trim``
        ctypes.CDLL(None).malloc_trim(0)


def device_limits() -> tuple[MemoryLimit, ...]:
    """Returns the memory limit of MLX's default device: Metal's working set, or a CUDA card's memory."""
    info, held, cached = mx.device_info(), mx.get_active_memory(), mx.get_cache_memory()
    if mx.metal.is_available() and (total := int(info.get("max_recommended_working_set_size", 0))):
        # MLX reports the value from the process's start; the user may have lowered it since.
        total = min(total, wired_limit() or total)
        return (_limit(total, held + cached, "Metal working set", common=True),)
    # MLX's device.h: free_memory exists only on CUDA. MLX's own cache can be used again.
    if "free_memory" in info and (total := int(info.get("total_memory", 0) or info.get("memory_size", 0))):
        used = total - int(info["free_memory"]) - cached
        return (_limit(total, used, f"CUDA memory of {info.get('device_name', 'the GPU')}", common=True),)
    return ()


def rlimits(root: Path = Path("/")) -> tuple[MemoryLimit, ...]:
    """Returns the soft RLIMIT_AS and RLIMIT_DATA that are set. Only on Linux, which enforces them (getrlimit(2))."""
    status = fields_of(root / "proc/self/status")
    limits = text_of(root / "proc/self/limits")
    found = []
    for label, counted, name in (("address space", "VmSize", "RLIMIT_AS"), ("data size", "VmData", "RLIMIT_DATA")):
        if soft := re.search(rf"^Max {label} +([0-9]+) ", limits, re.MULTILINE):
            found.append(_limit(int(soft[1]), status.get(counted, 0) * 1024, name))
    return tuple(found)


def cgroup_limits(root: Path = Path("/"), folders: Sequence[tuple[int, Path]] | None = None) -> tuple[MemoryLimit, ...]:
    """Returns memory limits of this process's control groups (v1 and v2) and their visible parents. ``folders``: as
    from ``cgroup_folders``.

    https://docs.kernel.org/admin-guide/cgroup-v2.html, https://docs.kernel.org/admin-guide/cgroup-v1/memory.html
    """
    found = []
    for version, folder in cgroup_folders(root) if folders is None else folders:
        held = text_of(folder / ("memory.current" if version == 2 else "memory.usage_in_bytes")).strip()
        if not held.isdecimal():  # the root group, or one without the memory controller
            continue
        shown, stat, total_ = "/" + folder.relative_to(root).as_posix(), fields_of(folder / "memory.stat"), ""
        # Beyond memory.high the kernel throttles processes. memory.stat of v1 also has the limit of groups above the
        # mount, whose folders are not visible.
        names, totals = ["memory.max", "memory.high"], list[tuple[int, str]]()
        if version == 1:
            names, total_ = ["memory.limit_in_bytes"], "total_"
        for name in names:
            text = text_of(folder / name).strip()
            if text.isdecimal():  # v2 writes "max" for no limit
                totals.append((int(text), name))
        if (above := stat.get("hierarchical_memory_limit")) is not None and totals and above < totals[0][0]:
            totals.append((above, "memory.stat hierarchical_memory_limit"))
        used = int(held) - stat.get(f"{total_}inactive_file", 0) - stat.get(f"{total_}active_file", 0)
        for total, name in totals:
            if total < _UNLIMITED:
                found.append(_limit(total, used, f"{shown}/{name}"))
    return tuple(found)


def cgroup_folders(root: Path = Path("/")) -> tuple[tuple[int, Path], ...]:
    """Returns version and folder of this process's memory groups, each followed by its visible parents."""
    return _folders(root, text_of(root / "proc/self/cgroup"), text_of(root / "proc/self/mountinfo"))


@lru_cache(4)
def _folders(root: Path, memberships: str, mounts: str) -> tuple[tuple[int, Path], ...]:
    """Returns the folders that these texts of proc(5) name; cached, as they are read while a model runs."""
    groups, found = {}, list[tuple[int, Path]]()
    for line in memberships.splitlines():  # id:controllers:path
        number, controllers, path = (*line.split(":", 2), "", "")[:3]
        if (number == "0" and not controllers) or "memory" in controllers.split(","):
            groups[1 if controllers else 2] = path
    for line in mounts.splitlines():
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
                found.append((version, (root / point.lstrip("/")).joinpath(*parts[:depth])))
    return tuple(found)


def _limit(total: int, used: int, source: str, common: bool = False) -> MemoryLimit:
    return MemoryLimit(total, min(total, max(0, total - used)), source, common)


def text_of(path: Path) -> str:
    """Returns the file's text; empty if it is missing or cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def fields_of(path: Path) -> dict[str, int]:
    """Parses `key value` and `Key:  value kB` lines, as in memory.stat and /proc/self/status; skips others."""
    found = {}
    for line in text_of(path).splitlines():
        key, number = (*line.split(maxsplit=2), "", "")[:2]
        if number.isdecimal():
            found[key.removesuffix(":")] = int(number)
    return found


@dataclass(frozen=True)
class Pressure:
    """One reading of free memory, paging, control group events and macOS's level. None: not reported by this system.

    Counters started before this process, so only differences of two readings mean anything.

    https://docs.kernel.org/admin-guide/cgroup-v2.html (memory.events),
    https://docs.kernel.org/admin-guide/cgroup-v1/memory.html (memory.oom_control)

    Attributes:
        limits: every limit on this process's memory; never empty.
        swap_ins: pages of 4 KiB that the machine has read from swap.
        major_faults: page faults of this process that waited for a disk; reads into slots cause none.
        oom: how often the control groups could free no more memory.
        oom_kill: processes of this group that the kernel killed for memory. Not counted: how often groups reached their
            limit, since page cache alone fills them.
        under_oom: whether tasks of a group wait for memory (v1).
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
    folders, level = cgroup_folders(root), pressure_level()
    # ``oom`` of all the groups, ``oom_kill`` of this process's own.
    oom = oom_kill = 0
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
        oom_kill += counts.get("oom_kill", 0) if first else 0
    swapped = re.search(r"(?m)^pswpin (\d+)$", text_of(root / "proc/vmstat"))
    return Pressure(
        limits=memory_limits(root, folders),
        swap_ins=None if swapped is None else int(swapped[1]),
        major_faults=resource.getrusage(resource.RUSAGE_SELF).ru_majflt,
        oom=oom,
        oom_kill=oom_kill,
        under_oom=under_oom,
        macos_level=level,
        warning_room=None if level is None else warning_room(),
    )


# Values that macOS reports through ``sysctlbyname(3)``. Never tried on a Mac.


def sysctl(name: str) -> bytes | None:
    """Returns a sysctl's value; None where it does not exist, as on Linux."""
    read = getattr(ctypes.CDLL(None), "sysctlbyname", None)
    if read is None:
        return None
    value, size = ctypes.create_string_buffer(_LONGEST), ctypes.c_size_t(_LONGEST)
    failed = read(name.encode(), value, ctypes.byref(size), None, ctypes.c_size_t(0))
    return None if failed else value.raw[: size.value]


def pressure_level() -> int | None:
    """Returns 1, ``WARNING`` or ``CRITICAL``; None where unknown (``sysctl_memorystatus_vm_pressure_level`` in xnu's
    bsd/kern/kern_memorystatus_notify.c)."""
    level = sysctl("kern.memorystatus_vm_pressure_level")
    found = None if level is None else int.from_bytes(level, sys.byteorder)
    return found if found in (1, WARNING, CRITICAL) else None


def wired_limit() -> int | None:
    """Returns the user's limit on bytes that the GPU may wire (``iogpu.wired_limit_mb``); None: macOS decides."""
    megabytes = int.from_bytes(sysctl("iogpu.wired_limit_mb") or b"", sys.byteorder)
    return megabytes << 20 if megabytes else None
