"""Describes the machine and the model, measures the disk's read rate (the ceiling for streaming), and empties the page
cache."""

from __future__ import annotations

import os
import platform
import re
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import mlx.core as mx
import psutil  # type: ignore[import-untyped]
from mlx.utils import tree_flatten

from outcore.checkpoint.checkpoint import open_checkpoint
from outcore.checkpoint.manifest import MANIFEST, is_packed, read_manifest
from outcore.decode.preparation import Preparation
from outcore.disk import disk_calls
from outcore.disk.layout import Extent
from outcore.disk.reader import FileReader, Read
from outcore.disk.ring import Slot
from outcore.machine.device import device_kind
from outcore.machine.hardware import cpu_name, filesystem, gpu_name
from outcore.sizes import BLOCK, round_up
from outcore.version import __version__

from .document import Machine, Model

THREADS = (4, 8)
# Bytes that are read into a slot at a time, about one layer of a 4 GB model.
PIECE = 128 << 20
# Least seconds of a repeat; small files are read several times in one.
LEAST_S = 0.2


@dataclass(frozen=True)
class DiskRate:
    """GB/s by number of threads, the medians and all repeats. ``direct``: whether reads bypassed the page cache."""

    gbps: dict[str, float]
    best_gbps: float
    repeats_gbps: dict[str, list[float]]
    direct: bool


def disk_rate(
    files: Sequence[Path],
    threads: Sequence[int] = THREADS,
    repeats: int = 3,
    piece: int = PIECE,
    most: int | None = None,
) -> DiskRate:
    """Times parallel reads into two slots. Reads bypass the page cache or, if they cannot, it is emptied first.

    Args:
        most: read only so many bytes, taken evenly from all files.
    """
    pieces = [
        Extent(file, at, min(piece, file.stat().st_size - at), 0, in_place=True)
        for file in files
        for at in range(0, file.stat().st_size, piece)
    ]
    nbytes = sum(e.nbytes for e in pieces)
    if most is not None and nbytes > most:
        keep = max(1, len(pieces) * most // nbytes)
        pieces = [pieces[i * len(pieces) // keep] for i in range(keep)]
    device = device_kind()
    slots = [Slot(round_up(max(e.nbytes for e in pieces), BLOCK), device) for _ in range(2)]
    rates: dict[str, list[float]] = {}
    direct = True
    # Each repeat tries all numbers of threads, so that a drift of the disk affects all alike.
    for _ in range(repeats):
        for n in threads:
            reader = FileReader(files, threads=n)
            direct = reader.direct
            seconds, passes = 0.0, 0
            while seconds < LEAST_S:
                drop_page_cache(files)
                seconds += _pass(reader, pieces, slots)
                passes += 1
            reader.close()
            rates.setdefault(str(n), []).append(passes * sum(e.nbytes for e in pieces) / seconds / 1e9)
    medians = {n: statistics.median(r) for n, r in rates.items()}
    return DiskRate(medians, max(medians.values()), rates, direct)


def _pass(reader: FileReader, pieces: Sequence[Extent], slots: Sequence[Slot]) -> float:
    began = time.perf_counter()
    in_flight: list[Read] = []
    for i, extent in enumerate(pieces):
        if len(in_flight) == len(slots):
            in_flight.pop(0).wait()
        in_flight.append(reader.submit("disk", [extent], slots[i % len(slots)].payload))
    for read in in_flight:
        read.wait()
    return time.perf_counter() - began


def drop_page_cache(files: Iterable[Path]) -> None:
    """Drops the files' pages from the page cache, except pages that are mapped."""
    calls = disk_calls.system()
    for path in files:
        fd = calls.open(path)
        try:
            calls.fsync(fd)
            calls.forget(fd, 0, path.stat().st_size)
        finally:
            calls.close(fd)


def weight_files(folder: Path) -> tuple[Path, ...]:
    if is_packed(folder):
        return tuple(folder / name for name in sorted(read_manifest(folder / MANIFEST).files))
    return open_checkpoint(folder).files


PACKAGES = ("mlx", "mlx-cpu", "mlx-cuda-12", "mlx-cuda-13", "mlx-metal", "mlx-lm", "numpy", "transformers")
DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def machine(folder: Path) -> Machine:
    # Inside the checkout of another project git answers, too, but does not track this file.
    in_checkout = bool(_run_git("ls-files", Path(__file__).name))
    return Machine(
        cpu=cpu_name(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        gpu=gpu_name(),
        device=str(mx.default_device()),
        memory_bytes=int(psutil.virtual_memory().total),
        filesystem=filesystem(folder),
        kernel=platform.platform(),
        python=platform.python_version(),
        versions=_versions(),
        git_commit=_run_git("rev-parse", "HEAD") if in_checkout else "",
        git_changed_files=len(_run_git("status", "--porcelain").splitlines()) if in_checkout else 0,
    )


def describe(name: str, prepared: Preparation) -> Model:
    profile = prepared.profile
    checkpoint, config = profile.lazy.checkpoint, profile.lazy.config
    dtypes: Counter[str] = Counter()
    for tensor in checkpoint.tensors.values():
        if tensor.dtype in DTYPES:
            dtypes[DTYPES[tensor.dtype]] += tensor.nbytes
    layers = sum(layer.nbytes for layer in profile.layers)
    quantization = config.get("quantization")
    return Model(
        name=name,
        model_type=str(config.get("model_type")),
        nbytes=checkpoint.nbytes,
        layers=len(profile.size.layers),
        layer_bytes=layers,
        non_layer_bytes=sum(a.nbytes for _, a in tree_flatten(profile.lazy.model.parameters())) - layers,
        quantization={k: v for k, v in quantization.items() if not isinstance(v, dict)} if quantization else None,
        dtype=dtypes.most_common(1)[0][0] if dtypes else "unknown",
    )


def _versions() -> dict[str, str]:
    found = {"outcore": __version__}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    try:
        driver = re.search(r"\d+\.\d+(\.\d+)?", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        driver = None
    return found | ({"nvidia driver": driver[0]} if driver else {})


def _run_git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout.rstrip()
