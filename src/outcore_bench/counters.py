"""What the system counts: bytes that this process read, and energy that the machine used."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx

POWERCAP = Path("/sys/class/powercap")
SAMPLE_MS = 200


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


class Counter(Protocol):
    """Joules that something used, counted up from an arbitrary beginning."""

    name: str

    def joules(self) -> float: ...

    def close(self) -> None: ...


class Energy:
    """Everything here that reports energy: CPU packages (RAPL), and the GPU where MLX computes on one.

    Attributes:
        source: e.g. ``RAPL + NVML``; None where nothing reports.
    """

    def __init__(self, counters: list[Counter]) -> None:
        self._counters = counters
        self.source = " + ".join(c.name for c in counters) or None

    @staticmethod
    def here() -> Energy:
        """What this machine has; readable counters only."""
        counters: list[Counter] = []
        if rapl := Rapl.find():
            counters.append(rapl)
        if mx.default_device().type == mx.DeviceType.gpu and (gpu := nvidia()):
            counters.append(gpu)
        return Energy(counters)

    def joules(self) -> float | None:
        return sum(c.joules() for c in self._counters) if self._counters else None

    def close(self) -> None:
        for counter in self._counters:
            counter.close()


class Rapl:
    """CPU packages, by https://docs.kernel.org/power/powercap/powercap.html; readable by root only, as a rule."""

    name = "RAPL"

    def __init__(self, packages: list[Path]) -> None:
        self._packages = packages
        self._last = [self._read(p) for p in packages]
        self._joules = 0.0

    @staticmethod
    def find(root: Path = POWERCAP) -> Rapl | None:
        """None where there is none, or none that may be read."""
        zones = sorted(root.glob("intel-rapl:[0-9]*")) if root.is_dir() else []
        try:
            # Parts of a package (cores, memory) lie below it; "psys" is the whole platform once more.
            packages = [z for z in zones if (z / "name").read_text().startswith("package")]
            return Rapl(packages) if packages else None
        except (OSError, ValueError):
            return None

    def joules(self) -> float:
        for i, package in enumerate(self._packages):
            now = self._read(package)
            delta = now - self._last[i]
            if delta < 0:  # the counter wraps around
                delta += int((package / "max_energy_range_uj").read_text())
            self._joules += delta / 1e6
            self._last[i] = now
        return self._joules

    def close(self) -> None:
        pass

    @staticmethod
    def _read(package: Path) -> int:
        return int((package / "energy_uj").read_text())


def nvidia() -> Counter | None:
    """The first visible NVIDIA GPU: NVML's energy counter by ``pynvml``, else ``nvidia-smi``'s power over time."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip() or "0"
    return Nvml.find(visible) or PowerLog.find(visible)


class Nvml:
    """``nvmlDeviceGetTotalEnergyConsumption``: millijoules since the driver was loaded, since Volta."""

    name = "NVML"

    def __init__(self, read: Callable[[], int], close: Callable[[], object]) -> None:
        self._read, self._close = read, close

    @staticmethod
    def find(gpu: str) -> Nvml | None:
        try:
            nvml: Any = importlib.import_module("pynvml")
        except ImportError:
            return None
        try:
            nvml.nvmlInit()
            by = nvml.nvmlDeviceGetHandleByIndex if gpu.isdecimal() else nvml.nvmlDeviceGetHandleByUUID
            handle = by(int(gpu) if gpu.isdecimal() else gpu)
            nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
        except nvml.NVMLError:
            return None
        return Nvml(lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle), nvml.nvmlShutdown)

    def joules(self) -> float:
        return self._read() / 1e3

    def close(self) -> None:
        self._close()


class PowerLog:
    """``nvidia-smi`` printing watts a few times a second; energy is their sum over time."""

    name = "nvidia-smi"

    def __init__(self, command: list[str], clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._joules, self._watts, self._since = 0.0, 0.0, clock()
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self._thread = threading.Thread(target=self._listen, name="outcore-power", daemon=True)
        self._thread.start()

    @staticmethod
    def find(gpu: str) -> PowerLog | None:
        program = shutil.which("nvidia-smi")
        if program is None:
            return None
        query = [program, "-i", gpu, "--query-gpu=power.draw", "--format=csv,noheader,nounits"]
        try:
            asked = subprocess.run(query, capture_output=True, text=True)
            float(asked.stdout)
        except (OSError, ValueError):
            return None
        return PowerLog([*query, f"--loop-ms={SAMPLE_MS}"])

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                watts = float(line)
            except ValueError:
                continue
            self.joules()
            with self._lock:
                self._watts = watts

    def joules(self) -> float:
        with self._lock:
            now = self._clock()
            self._joules += self._watts * (now - self._since)
            self._since = now
            return self._joules

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        self._thread.join()
        if self._process.stdout is not None:
            self._process.stdout.close()
