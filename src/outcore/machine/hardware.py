"""Names and sizes of the processor, device and disks; no paths."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import sys
from pathlib import Path

import mlx.core as mx
import psutil  # type: ignore[import-untyped]

from .device import on_cpu
from .memory import sysctl, text_of

# Returns a package's version. Cached: parsing metadata each time took a tenth of the time to load a small model.
version = functools.cache(importlib.metadata.version)


def cores() -> int:
    """Returns the number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_name() -> str:
    lines = text_of(Path("/proc/cpuinfo")).splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    apple = (sysctl("machdep.cpu.brand_string") or b"").partition(b"\0")[0].decode(errors="replace").strip()
    return apple or "".join(models[:1]) or platform.processor() or platform.machine()


def gpu_name() -> str | None:
    """Returns the name of MLX's default GPU; None on the CPU device."""
    return None if on_cpu() else str(mx.device_info().get("device_name", "unknown"))


def filesystem(folder: Path) -> str:
    """Returns a folder's file system and disk, such as ``ext4 on nvme0n1p2 (Samsung SSD 990)``."""
    return _mounted_at(folder.resolve(), folder.stat().st_dev if folder.exists() else None)


@functools.cache  # every load calls it, and the system's list is long
def _mounted_at(folder: Path, number: int | None) -> str:
    partitions = psutil.disk_partitions(all=True)
    mounts = [p for p in partitions if folder.is_relative_to(p.mountpoint)]
    if sys.platform == "darwin":  # most folders of / are on another volume, which their paths do not show
        mounts = [p for p in partitions if number == Path(p.mountpoint).stat().st_dev] or mounts
    mount = max(mounts, key=lambda p: len(p.mountpoint), default=None)
    if mount is None:
        return "unknown"
    device = str(mount.device).rsplit("/", 1)[-1]
    block = Path("/sys/class/block") / device
    # A partition's folder is inside its disk's.
    models = [text_of(disk / "device/model").strip() for disk in (block, block.resolve().parent)]
    return f"{mount.fstype} on {device}" + next((f" ({model})" for model in models if model), "")
