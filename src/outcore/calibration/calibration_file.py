"""Stored calibrations, and the interface to the package that measures them (entry point group ``calibration``).

There is one JSON file per machine, device, MLX version and disk, in the cache folder. It collects the times of layers
of several models.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol, cast

import psutil  # type: ignore[import-untyped]
import xxhash
from pydantic import TypeAdapter

from ..engine.model_profile import ModelProfile
from ..errors import CalibrationError, StoreError
from ..machine.cache_folder import cache_dir, keep_document
from ..machine.hardware import cores, cpu_name, filesystem, gpu_name, version
from ..machine.small_files import CONFIG_BYTES, parse_json, read_small
from ..options import IO_MODES
from ..packages import modules
from ..plan.machine_profile import Calibration

FORMAT = "outcore-calibration"
# The schema that is written, and those that are read.
SCHEMA, READ = 2, (1, 2)

_WANTED = {"read_gbps", "read_latency_s", "sync_s", "weight_gbps", "io", "threads", "chunk", "kinds"}
# Bounds of every number in a calibration.
_LEAST, _MOST = 1e-12, 1e12

_CALIBRATION = TypeAdapter(Calibration)

Key = Mapping[str, str | int | None]


def key_of(folder: Path, cpu_streams: int) -> Key:
    """Returns names, sizes and versions that identify a machine and a disk.

    Args:
        folder: a model's folder, on the disk; if it does not exist, its nearest existing parent is used.
        cpu_streams: streams that linear layers are split over on the CPU device; 1 on a GPU.
    """
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    gpu = gpu_name()
    return {
        "device": "cpu" if gpu is None else "gpu",
        "cpu_streams": cpu_streams,
        "filesystem": filesystem(folder),
        "disk_gib": round(shutil.disk_usage(folder).total / 2**30),
        "mlx": version("mlx"),
        "cpu": cpu_name(),
        "cores": cores(),
        # Rounded, since the kernel reserves a different amount after every start.
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "gpu": gpu,
    }


def file_of(key: Key) -> Path:
    digest = xxhash.xxh64_hexdigest(json.dumps(dict(key), sort_keys=True).encode())
    return cache_dir() / "calibration" / f"{digest}.json"


def load_calibration(folder: Path, cpu_streams: int) -> Calibration | None:
    """Returns the stored calibration of this machine and the disk of ``folder``; None if there is no valid one."""
    try:
        key = key_of(folder, cpu_streams)
        document = parse_json(read_small(file_of(key), CONFIG_BYTES), twins=False)
        known = isinstance(document, dict) and document.get("format") == FORMAT and document.get("schema") in READ
        return _calibration(document.get("calibration")) if known and document.get("key") == dict(key) else None
    except (OSError, StoreError, ValueError):  # unreadable, or not a calibration
        return None


def store_calibration(folder: Path, cpu_streams: int, calibration: Calibration) -> Path:
    """Stores a calibration for this machine and the disk of ``folder``, and returns its file.

    The file keeps the times of other kinds of layers that an earlier calibration has.

    Raises:
        CalibrationError: the cache folder cannot be written, or others could write to it.
    """
    key = key_of(folder, cpu_streams)
    before = load_calibration(folder, cpu_streams)
    kept = replace(calibration, kinds={**(before.kinds if before else {}), **calibration.kinds})
    try:
        path = file_of(key)
        keep_document(path, {"format": FORMAT, "schema": SCHEMA, "key": key, "calibration": asdict(kept)})
    except StoreError as e:
        raise CalibrationError(f"the calibration cannot be saved: {e}") from e
    except OSError as e:
        advice = "" if "OUTCORE_CACHE" in str(e.strerror) else "; set OUTCORE_CACHE to a folder that can be written"
        raise CalibrationError(f"{path.parent}: the calibration cannot be saved: {e.strerror}{advice}") from e
    return path


def _calibration(found: Any) -> Calibration:
    """Makes a calibration from parsed JSON, and checks the type and range of each value.

    Raises:
        ValueError: a value is missing, has the wrong type, or is out of range.
    """
    if not isinstance(found, dict) or _WANTED - found.keys():
        raise ValueError("no calibration, or values are missing")
    # As JSON again: in strict mode pydantic accepts neither tuples nor integer keys from Python values.
    c = _CALIBRATION.validate_json(json.dumps(found), strict=True)
    c = replace(c, kinds={kind: times for kind, times in c.kinds.items() if times})
    numbers = [n for n in asdict(c).values() if isinstance(n, int | float) and not isinstance(n, bool)]
    for times in c.kinds.values():
        numbers += [*times.keys(), *times.values()]
    if not all(_LEAST <= n <= _MOST for n in numbers) or c.io not in IO_MODES:
        raise ValueError("a number out of range, or an unknown io mode")
    if not 1 <= (c.threads or 1) <= 256 or not 4096 <= (c.chunk or 4096) <= 1 << 30:
        raise ValueError("threads or chunk out of range")
    return c


Progress = Callable[[str, int, int], None]


class Measuring(Protocol):
    def calibrated(
        self,
        profile: ModelProfile | None,
        folder: Path,
        cpu_streams: int,
        *,
        force: bool = False,
        progress: Progress = lambda *_: None,
        note: Callable[[str], None] = lambda _: None,
    ) -> tuple[Calibration, tuple[str, ...]]:
        """Returns the calibration of this machine, the disk of ``folder`` and a model's layers; measures and stores
        what is missing. The second value names what was measured."""


def measuring() -> Measuring:
    """Returns the module that measures.

    Raises:
        CalibrationError: no package provides one.
    """
    for module in modules("calibration").values():
        return cast(Measuring, module)
    raise CalibrationError("measuring this machine needs the package outcore_calibrate, which is missing; install it")
