"""What memory there is: machine, control group, process limits, GPU. With `pressure`, `reader`, and what `memory_calls`
asks of macOS, the only platform-specific code.

Every limit is stated as what it allows in all and what it still allows now. Page cache counts as allowed: the kernel
gives it up when asked. Files are read below a `root`, so that tests can stand up any machine in a folder.
"""

from __future__ import annotations

import re
import resource
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from . import memory_calls
from .mac_memory import CRITICAL, MacMemory, mac_memory, wired_limit
from .memory_calls import MemoryCalls
from .shared_host import shared_by

# What default_budget leaves alone: room for other programs to grow, for the page cache that buffered reads go through,
# and for what the budget does not count (MLX's kernels, threads' stacks, malloc's slack). A limit of this process's
# own needs less than memory that every program draws on.
SHARES = {"safety": (0.75, 0.6), "balanced": (0.9, 0.8), "performance": (0.95, 0.9)}
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


def process_memory_limit(root: Path = Path("/"), calls: MemoryCalls | None = None) -> MemoryLimit:
    """The limit that leaves the least to allocate now; of equals, the one with the smaller total."""
    return min(memory_limits(root, calls=calls), key=lambda limit: (limit.available, limit.total))


def memory_limits(
    root: Path = Path("/"),
    *,
    device: bool = True,
    calls: MemoryCalls | None = None,
    mac: MacMemory | None = None,
) -> tuple[MemoryLimit, ...]:
    """Every limit that applies to this process, the machine's own memory first; that of the GPU only with `device`.

    On macOS the machine's is what can be had with other programs' inactive memory compressed: psutil counts all of
    that as free.

    Args:
        calls: what macOS and MLX are asked by; the system's own by default.
        mac: a reading that was just taken; None: one is taken, where this is a Mac.
    """
    mac = mac or mac_memory(calls)
    total, available = (mac.total, mac.available) if mac is not None else (calls or memory_calls.SYSTEM).machine()
    limits = (_limit(total, total - available, "machine", common=True),)
    return limits + cgroup_limits(root) + rlimits(root) + (device_limits(calls) if device else ())


def default_budget(
    limit: MemoryLimit | None = None, profile: str = "balanced", calls: MemoryCalls | None = None
) -> int:
    """Bytes for Outcore where the user gives no `--memory`: a safe share of what is free, less what Python will take.

    `share * available - max(_LEAST_RESERVE, PROCESS_BYTES - rss)`, and 0 where that is negative. On macOS less:

        available   what can be had without compressing anything, if it is less than what the limits leave
        then        at most what can be wired before macOS warns of memory pressure, but half of it in any case: a
                    warning stops nothing, and the compressor makes room, only slowly
        critical    0: whatever is taken now is taken from a program in use

    Of ranks on one host each has its part.

    Args:
        limit: the limit to stay within; this process's own by default, which macOS's own numbers are counted with.
        profile: one of ``options.PROFILES``.
    """
    mac = mac_memory(calls) if limit is None else None
    limit = limit or process_memory_limit(calls=calls)
    own, common = SHARES[profile]
    reserve = max(_LEAST_RESERVE, PROCESS_BYTES - rss())
    share = (common if limit.common else own) / shared_by()
    if mac is None:
        return max(0, int(share * limit.available) - reserve)
    if mac.level == CRITICAL:
        return 0
    budget = max(0, int(share * min(limit.available, mac.uncompressed)) - reserve)
    return min(budget, max(mac.warning_room // shared_by(), budget // 2))


def last_resort(limit: MemoryLimit | None = None) -> int:
    """Bytes that may still be planned with where `default_budget` is too small for a model to run at all."""
    limit = limit or process_memory_limit()
    return max(0, limit.available // shared_by() - _LEAST_RESERVE)


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


def cgroup_limits(root: Path = Path("/")) -> tuple[MemoryLimit, ...]:
    """The memory limits of this process's control groups (v1 and v2) and of all groups above them that can be seen.

    https://docs.kernel.org/admin-guide/cgroup-v2.html, https://docs.kernel.org/admin-guide/cgroup-v1/memory.html
    """
    limits: list[MemoryLimit] = []
    for version, folder in cgroup_folders(root):
        read = _v2_limits if version == 2 else _v1_limits
        limits.extend(read(folder, "/" + folder.relative_to(root).as_posix()))
    return tuple(limits)


def cgroup_folders(root: Path = Path("/")) -> Iterator[tuple[int, Path]]:
    """Version and folder of this process's memory groups, each followed by those above it that can be seen."""
    groups = dict(_own_groups(text_of(root / "proc/self/cgroup")))
    for version, mount_root, mount_point in _cgroup_mounts(text_of(root / "proc/self/mountinfo")):
        if version in groups:
            for folder in _folders_upwards(root, mount_root, mount_point, groups[version]):
                yield version, folder


def rlimits(root: Path = Path("/")) -> tuple[MemoryLimit, ...]:
    """The soft RLIMIT_AS and RLIMIT_DATA where they are set and the kernel keeps them: on Linux, see getrlimit(2)."""
    status = fields_of(root / "proc/self/status")
    limits = text_of(root / "proc/self/limits")
    found = []
    for label, counted, name in (("address space", "VmSize", "RLIMIT_AS"), ("data size", "VmData", "RLIMIT_DATA")):
        soft = re.search(rf"^Max {label} +([0-9]+) ", limits, re.MULTILINE)
        if soft:
            found.append(_limit(int(soft[1]), status.get(counted, 0) * 1024, name))
    return tuple(found)


def device_limits(calls: MemoryCalls | None = None) -> tuple[MemoryLimit, ...]:
    """The memory of MLX's default device where it has a limit of its own: Metal's working set, a CUDA card's memory."""
    calls = calls or memory_calls.SYSTEM
    info, (active, cached) = calls.device_info(), calls.device_bytes()
    found = []
    if calls.metal() and (total := int(info.get("max_recommended_working_set_size", 0))):
        # MLX knows what it was when the process began; the user may have set less since.
        total = min(total, wired_limit(calls) or total)
        found.append(_limit(total, active + cached, "Metal working set", common=True))
    # MLX's device.h: free_memory is given on CUDA only. What MLX itself caches there can be used again.
    if "free_memory" in info and (total := int(info.get("total_memory", 0) or info.get("memory_size", 0))):
        used = total - int(info["free_memory"]) - cached
        found.append(_limit(total, used, f"CUDA memory of {info.get('device_name', 'the GPU')}", common=True))
    return tuple(found)


def _limit(total: int, used: int, source: str, common: bool = False) -> MemoryLimit:
    return MemoryLimit(total, min(total, max(0, total - used)), source, common)


def _own_groups(text: str) -> Iterator[tuple[int, str]]:
    """Version and path of this process's memory groups, from /proc/self/cgroup (`id:controllers:path` lines)."""
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            yield 2, path
        elif "memory" in controllers.split(","):
            yield 1, path


def _cgroup_mounts(text: str) -> Iterator[tuple[int, str, str]]:
    """Version, root and mount point of every mounted memory hierarchy, from /proc/self/mountinfo (proc(5))."""
    for line in text.splitlines():
        mount, _, kind = line.partition(" - ")
        fields, kinds = mount.split(), kind.split()
        if len(fields) < 5 or len(kinds) < 3:
            continue
        version = 2 if kinds[0] == "cgroup2" else 1 if kinds[0] == "cgroup" and "memory" in kinds[2].split(",") else 0
        if not version:
            continue
        # Spaces in paths are written as octal escapes.
        mount_root, mount_point = (re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), f) for f in fields[3:5])
        yield version, mount_root, mount_point


def _folders_upwards(root: Path, mount_root: str, mount_point: str, group: str) -> Iterator[Path]:
    """The group's folder and those above it, up to the mount point."""
    top = root / mount_point.lstrip("/")
    # In a container the mount can show a part of the hierarchy only, with this process's group at its top.
    prefix = mount_root.rstrip("/") + "/"
    inside = group[len(prefix) :] if (group + "/").startswith(prefix) else ""
    parts = [] if ".." in inside.split("/") else [part for part in inside.split("/") if part]
    for depth in range(len(parts), -1, -1):
        yield top.joinpath(*parts[:depth])


def _v2_limits(folder: Path, shown: str) -> Iterator[MemoryLimit]:
    used = number_in(folder / "memory.current")
    if used is None:  # the root group, or one without the memory controller
        return
    stat = fields_of(folder / "memory.stat")
    used -= stat.get("inactive_file", 0) + stat.get("active_file", 0)
    for name in ("memory.max", "memory.high"):  # past memory.high nobody is killed, but everything crawls
        total = number_in(folder / name)
        if total is not None:
            yield _limit(total, used, f"{shown}/{name}")


def _v1_limits(folder: Path, shown: str) -> Iterator[MemoryLimit]:
    used = number_in(folder / "memory.usage_in_bytes")
    total = number_in(folder / "memory.limit_in_bytes")
    if used is None or total is None:
        return
    stat = fields_of(folder / "memory.stat")
    used -= stat.get("total_inactive_file", 0) + stat.get("total_active_file", 0)
    if total < _UNLIMITED:
        yield _limit(total, used, f"{shown}/memory.limit_in_bytes")
    # Groups above the mount point cannot be seen; their limit can.
    hierarchical = stat.get("hierarchical_memory_limit", _UNLIMITED)
    if hierarchical < min(total, _UNLIMITED):
        yield _limit(hierarchical, used, f"{shown}/memory.stat hierarchical_memory_limit")


def text_of(path: Path) -> str:
    """The file's text; empty where there is none, as on macOS, or where it may not be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def number_in(path: Path) -> int | None:
    text = text_of(path).strip()
    return int(text) if text.isdecimal() else None  # v2 writes "max" for no limit


def fields_of(path: Path) -> dict[str, int]:
    """`key value` and `Key:  value kB` lines, as in memory.stat and /proc/self/status; others are left out."""
    return {key: int(number) for key, number in re.findall(r"(?m)^(\w[^\s:]*):?\s+(\d+)(?!\S)", text_of(path))}
