"""What memory there is: of the machine, the control group, this process, the GPU.

Every limit is stated as what it allows in all and what it still allows now. Page cache counts as allowed: the kernel
gives it up when asked. Files are read below a ``root``, so that tests can stand up any machine in a folder.
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

# What default_budget leaves alone: room for other programs to grow, for the page cache that buffered reads go through,
# and for what the budget does not count (MLX's kernels, threads' stacks, malloc's slack). A limit of this process's
# own needs less than memory that every program draws on.
OWN_SHARE, COMMON_SHARE = 0.9, 0.8
# Python, MLX, mlx-lm and a tokenizer of 150,000 words: 180 MB resident on Linux, MLX 0.32.4.
PROCESS_BYTES = 200_000_000
_LEAST_RESERVE = 64_000_000  # and some growth even where the process is that large already
_UNLIMITED = 2**60  # cgroup v1 writes "no limit" as 2**63 less a page


@dataclass(frozen=True)
class MemoryLimit:
    """One limit on this process, in bytes.

    Attributes:
        total: what it allows at most, for everything that counts against it.
        available: what can still be allocated now; never negative, never more than `total`.
        source: the limit's name, for the user: `machine`, `/sys/fs/cgroup/app/memory.max`, `RLIMIT_AS`, `Metal`.
        common: other programs draw on it too.
    """

    total: int
    available: int
    source: str
    common: bool = False


def process_memory_limit(root: Path = Path("/")) -> MemoryLimit:
    """The limit that leaves the least to allocate now; of equals, the one with the smaller total."""
    return min(memory_limits(root), key=lambda limit: (limit.available, limit.total))


def memory_limits(root: Path = Path("/")) -> tuple[MemoryLimit, ...]:
    """Every limit that applies to this process, the machine's own memory first.

    Of a Mac's inactive memory half counts as available, for macOS has to compress it first.
    """
    found = psutil.virtual_memory()
    available = found.available if mac.pressure_level() is None else found.free + found.inactive // 2
    machine = _limit(found.total, found.total - available, "machine", common=True)
    return (machine, *cgroup_limits(root), *rlimits(root), *device_limits())


def warning_room() -> int | None:
    """Bytes that can be wired before macOS warns of memory pressure, if nothing else changes; None on other systems.

    xnu warns where the active, inactive and free pages are fewer than those that hold compressed ones, and until they
    are half as many again (``VM_PRESSURE_NORMAL_TO_WARNING``, osfmk/vm/vm_pageout.c, xnu-11417). Wiring pages, as the
    GPU does with weights, makes the first fewer, however much is free. psutil gives no number of the second: they are
    what is left of all pages.
    """
    if mac.pressure_level() is None:
        return None
    found = psutil.virtual_memory()
    unwired = found.active + found.inactive + found.free
    return max(0, int(2 * unwired - (found.total - found.wired)))


def default_budget(limit: MemoryLimit | None = None) -> int:
    """Bytes for Outcore where the user gives no `--memory`: a safe share of what is free, less what Python will take.

    `share * available - max(_LEAST_RESERVE, PROCESS_BYTES - rss)`, and 0 where that is negative. On macOS at most what
    can be wired before macOS warns of memory pressure, but half of the rest in any case, since a warning stops nothing;
    and 0 where the pressure is critical. Of ranks on one host each has its part.

    Args:
        limit: the limit to stay within; this process's own by default.
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
    """Bytes that may still be planned with where `default_budget` is too small for a model to run at all."""
    limit = limit or process_memory_limit()
    return max(0, limit.available // shared_by() - _LEAST_RESERVE)


def shared_by() -> int:
    """How many processes divide the memory; 1 for one that has it for itself."""
    found = os.environ.get(SHARED_BY, "1")
    return max(1, int(found)) if found.isdecimal() and len(found) < 6 else 1


def rss() -> int:
    """Bytes of this process that are resident now, shared libraries and mapped files included."""
    return int(psutil.Process().memory_info().rss)


def peak_rss(root: Path = Path("/")) -> int:
    """The most bytes of this process that were ever resident.

    On Linux from VmHWM: getrusage there keeps the peak of the process that started this one (measured: a parent of
    500 MB makes a fresh Python report 500 MB, VmHWM says 9 MB).
    """
    status = fields_of(root / "proc/self/status")
    if "VmHWM" in status:
        return status["VmHWM"] * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # getrusage(2): bytes on macOS, KiB elsewhere


def share_one_heap() -> None:
    """All threads that are begun from now on allocate from one heap: of glibc's others ``free_heap`` cannot give back
    the end (mallopt(3), malloc_trim(3)). Elsewhere it does nothing."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(-8, 1)  # M_ARENA_MAX, malloc.h


def free_heap() -> None:
    """Give memory that was freed back to the system, after something large has gone: Python and the C library keep some
    of it for later."""
    gc.collect()
    with suppress(AttributeError, OSError):  # glibc alone has it
        ctypes.CDLL(None).malloc_trim(0)


def device_limits() -> tuple[MemoryLimit, ...]:
    """The memory of MLX's default device where it has a limit of its own: Metal's working set, a CUDA card's memory."""
    info, held, cached = mx.device_info(), mx.get_active_memory(), mx.get_cache_memory()
    if mx.metal.is_available() and (total := int(info.get("max_recommended_working_set_size", 0))):
        # MLX knows what it was when the process began; the user may have set less since.
        total = min(total, mac.wired_limit() or total)
        return (_limit(total, held + cached, "Metal working set", common=True),)
    # MLX's device.h: free_memory is given on CUDA only. What MLX itself caches there can be used again.
    if "free_memory" in info and (total := int(info.get("total_memory", 0) or info.get("memory_size", 0))):
        used = total - int(info["free_memory"]) - cached
        return (_limit(total, used, f"CUDA memory of {info.get('device_name', 'the GPU')}", common=True),)
    return ()


def rlimits(root: Path = Path("/")) -> tuple[MemoryLimit, ...]:
    """The soft RLIMIT_AS and RLIMIT_DATA where they are set and the kernel keeps them: on Linux, see getrlimit(2)."""
    status = fields_of(root / "proc/self/status")
    limits = text_of(root / "proc/self/limits")
    found = []
    for label, counted, name in (("address space", "VmSize", "RLIMIT_AS"), ("data size", "VmData", "RLIMIT_DATA")):
        if soft := re.search(rf"^Max {label} +([0-9]+) ", limits, re.MULTILINE):
            found.append(_limit(int(soft[1]), status.get(counted, 0) * 1024, name))
    return tuple(found)


def cgroup_limits(root: Path = Path("/")) -> tuple[MemoryLimit, ...]:
    """The memory limits of this process's control groups (v1 and v2) and of all groups above them that can be seen.

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
        # Past memory.high nobody is killed, but everything crawls. Of groups above a v1 mount, which cannot be seen,
        # the limit can.
        names = ("memory.max", "memory.high") if version == 2 else ("memory.limit_in_bytes",)
        totals = [(_number_in(folder / name), name) for name in names]
        if (above := stat.get("hierarchical_memory_limit")) is not None and above < (totals[0][0] or 0):
            totals.append((above, "memory.stat hierarchical_memory_limit"))
        found += [_limit(n, used, f"{shown}/{name}") for n, name in totals if n is not None and n < _UNLIMITED]
    return tuple(found)


def cgroup_folders(root: Path = Path("/")) -> Iterator[tuple[int, Path]]:
    """Version and folder of this process's memory groups, each followed by those above it that can be seen."""
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
            # In a container the mount can show a part of the hierarchy only, with this process's group at its top.
            prefix, group = shown.rstrip("/") + "/", groups[version]
            inside = group[len(prefix) :] if (group + "/").startswith(prefix) else ""
            parts = [] if ".." in inside.split("/") else [part for part in inside.split("/") if part]
            for depth in range(len(parts), -1, -1):
                yield version, (root / point.lstrip("/")).joinpath(*parts[:depth])


def _limit(total: int, used: int, source: str, common: bool = False) -> MemoryLimit:
    return MemoryLimit(total, min(total, max(0, total - used)), source, common)


def text_of(path: Path) -> str:
    """The file's text; empty where there is none, as on macOS, or where it may not be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _number_in(path: Path) -> int | None:
    text = text_of(path).strip()
    return int(text) if text.isdecimal() else None  # v2 writes "max" for no limit


def fields_of(path: Path) -> dict[str, int]:
    """`key value` and `Key:  value kB` lines, as in memory.stat and /proc/self/status; others are left out."""
    return {key: int(number) for key, number in re.findall(r"(?m)^(\w[^\s:]*):?\s+(\d+)(?!\S)", text_of(path))}
