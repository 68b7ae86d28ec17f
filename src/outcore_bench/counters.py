"""What the system counts: bytes that this process read, and energy that the machine used."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

POWERCAP = Path("/sys/class/powercap")

Joules = Callable[[], float]
"""Joules that something used, counted up from an arbitrary beginning."""


@dataclass(frozen=True)
class Reads:
    """Bytes that this process has read so far: ``device`` from the disk, ``asked`` by all its read calls.

    proc(5): direct reads count in both; what the page cache gave counts in ``asked`` alone. Read-ahead of the kernel
    counts in ``device`` before it is asked for.
    """

    device: int
    asked: int

    @property
    def cached(self) -> int:
        """Bytes that came from the page cache."""
        return max(0, self.asked - self.device)

    def since(self, before: Reads) -> Reads:
        return Reads(self.device - before.device, self.asked - before.asked)


def process_reads(root: Path = Path("/")) -> Reads | None:
    """From ``/proc/self/io``; None where the system has none."""
    try:
        lines = (root / "proc/self/io").read_text().splitlines()
    except OSError:
        return None
    fields = {name: int(value) for name, _, value in (line.partition(": ") for line in lines)}
    return Reads(fields["read_bytes"], fields["rchar"]) if {"read_bytes", "rchar"} <= fields.keys() else None


class Energy:
    """Everything here that reports energy: CPU packages (RAPL), and the GPU where MLX computes on one (NVML).

    Attributes:
        source: e.g. ``RAPL + NVML``; None where nothing reports.
    """

    def __init__(self) -> None:
        self._end = ExitStack()
        found = {"RAPL": rapl(), "NVML": None}
        if mx.default_device().type == mx.DeviceType.gpu:
            found["NVML"] = nvml(self._end)
        self._counters = [count for count in found.values() if count is not None]
        self.source = " + ".join(name for name, count in found.items() if count is not None) or None

    def joules(self) -> float | None:
        return sum(count() for count in self._counters) if self._counters else None

    def close(self) -> None:
        self._end.close()


def rapl(root: Path = POWERCAP) -> Joules | None:
    """Of CPU packages, by https://docs.kernel.org/power/powercap/powercap.html; readable by root only, as a rule."""

    def read(package: Path) -> int:
        return int((package / "energy_uj").read_text())

    try:
        # Parts of a package (cores, memory) lie below it; "psys" is the whole platform once more.
        zones = sorted(root.glob("intel-rapl:[0-9]*")) if root.is_dir() else []
        last = {zone: read(zone) for zone in zones if (zone / "name").read_text().startswith("package")}
    except (OSError, ValueError):
        return None
    total = 0.0

    def joules() -> float:
        nonlocal total
        for package, before in last.items():
            now = last[package] = read(package)
            wrapped = int((package / "max_energy_range_uj").read_text()) if now < before else 0
            total += (now - before + wrapped) / 1e6
        return total

    return joules if last else None


def nvml(end: ExitStack) -> Joules | None:
    """Of the first visible NVIDIA GPU, by ``nvmlDeviceGetTotalEnergyConsumption``, since Volta; with pynvml."""
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip() or "0"
    try:
        library: Any = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        library.nvmlInit()
        end.callback(library.nvmlShutdown)
        by = library.nvmlDeviceGetHandleByIndex if gpu.isdecimal() else library.nvmlDeviceGetHandleByUUID
        handle = by(int(gpu) if gpu.isdecimal() else gpu)
        library.nvmlDeviceGetTotalEnergyConsumption(handle)
    except library.NVMLError:
        return None
    return lambda: float(library.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3
