"""What the machine is made of, by name: processor, device, disks. Names and sizes only, no paths."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

import mlx.core as mx
import psutil  # type: ignore[import-untyped]

from . import memory_calls
from .device import on_cpu
from .memory_calls import MemoryCalls


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_name(calls: MemoryCalls | None = None) -> str:
    """The processor's name as the system gives it; on macOS ``machdep.cpu.brand_string``, where Python says ``arm``."""
    if name := (calls or memory_calls.SYSTEM).text("machdep.cpu.brand_string"):
        return name
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    models = [line for line in lines if line.startswith("model name")]
    return models[0].partition(":")[2].strip() if models else platform.processor() or platform.machine()


def gpu_name() -> str | None:
    """The name of the GPU that MLX computes on by default; None where that is the CPU."""
    if on_cpu():
        return None
    return str(mx.device_info().get("device_name", "unknown"))


def filesystem(folder: Path) -> str:
    """File system and disk of a folder, e.g. ``ext4 on nvme0n1p2 (Samsung SSD 990)``, ``apfs on disk3s5``."""
    # Each model that is loaded asks, and the system's list is long. What does not exist is said by who reads it.
    try:
        number = folder.stat().st_dev
    except OSError:
        return _mounted_at(folder, None)
    if number not in _mounted:
        _mounted[number] = _mounted_at(folder, number)
    return _mounted[number]


_mounted: dict[int, str] = {}
"""What each device's number stands for."""


def _mounted_at(folder: Path, number: int | None) -> str:
    partitions = psutil.disk_partitions(all=True)
    mounts = [p for p in partitions if folder.resolve().is_relative_to(p.mountpoint)]
    if sys.platform == "darwin":  # most of what lies below / is on another volume there, and no path says so
        mounts = [p for p in partitions if number == Path(p.mountpoint).stat().st_dev] or mounts
    mount = max(mounts, key=lambda p: len(p.mountpoint), default=None)
    if mount is None:
        return "unknown"
    device = str(mount.device).rsplit("/", 1)[-1]
    model = _disk_model(device)
    return f"{mount.fstype} on {device}" + (f" ({model})" if model else "")


def _disk_model(device: str) -> str:
    block = Path("/sys/class/block") / device
    # A partition's folder lies in its disk's.
    for disk in (block, block.resolve().parent):
        try:
            return (disk / "device/model").read_text().strip()
        except OSError:
            continue
    return ""
