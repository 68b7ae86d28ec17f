"""Calibrations on disk: one JSON file for each machine, device, version of MLX and disk, in the user's cache folder.

What was measured on other hardware or with another MLX lies in another file, and one of another schema is not read.
Kinds of layers of several models gather in one file.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import xxhash
from pydantic import TypeAdapter

from ..errors import CalibrationError, StoreError
from ..machine.cache_folder import cache_dir, keep_document
from ..machine.hardware import cores, cpu_name, filesystem, gpu_name, version
from ..machine.small_files import CONFIG_BYTES, parse_json, read_small
from ..options import IO_MODES
from ..plan.machine_profile import Calibration

FORMAT = "outcore-calibration"
SCHEMA, READ = 2, (1, 2)
"""The version that is written, and those that are read: of the first one what is in this one too."""

_WANTED = {"read_gbps", "read_latency_s", "sync_s", "weight_gbps", "io", "threads", "chunk", "kinds"}
_LEAST, _MOST = 1e-12, 1e12
"""Of any number in a calibration: no machine is slower or faster."""

_CALIBRATION = TypeAdapter(Calibration)

Key = Mapping[str, str | int | None]


def key_of(folder: Path, cpu_streams: int) -> Key:
    """What tells machines and disks apart: names, sizes and versions.

    Args:
        folder: of a model, or one that does not exist yet: its nearest parent that does.
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
        # The kernel keeps a part for itself, and not the same one after every start.
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "gpu": gpu,
    }


def file_of(key: Key) -> Path:
    """Where the calibration of that key lies, or would."""
    digest = xxhash.xxh64_hexdigest(json.dumps(dict(key), sort_keys=True).encode())
    return cache_dir() / "calibration" / f"{digest}.json"


def load_calibration(folder: Path, cpu_streams: int) -> Calibration | None:
    """The calibration of this machine and of the disk that ``folder`` is on; None where there is none that can be used.
    Raises nothing."""
    try:
        key = key_of(folder, cpu_streams)
        document = parse_json(read_small(file_of(key), CONFIG_BYTES), twins=False)
        known = isinstance(document, dict) and document.get("format") == FORMAT and document.get("schema") in READ
        return _calibration(document.get("calibration")) if known and document.get("key") == dict(key) else None
    except (OSError, StoreError, ValueError):  # it cannot be read, is no JSON, or no calibration
        return None


def store_calibration(folder: Path, cpu_streams: int, calibration: Calibration) -> Path:
    """Keep a calibration of this machine and of the disk that ``folder`` is on, and return its file.

    Kinds of layers that an earlier calibration knows and this one does not are kept.

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
        raise CalibrationError(f"the calibration cannot be kept: {e}") from e
    except OSError as e:
        advice = "" if "OUTCORE_CACHE" in str(e.strerror) else "; set OUTCORE_CACHE to a folder that can be written"
        raise CalibrationError(f"{path.parent}: the calibration cannot be kept: {e.strerror}{advice}") from e
    return path


def _calibration(found: Any) -> Calibration:
    """A calibration from what JSON makes of one, every value of the type that its class says, none converted.

    Raises:
        ValueError: it is none, or nothing could be computed with it.
    """
    if not isinstance(found, dict) or _WANTED - found.keys():
        raise ValueError("not all of a calibration")
    # As JSON again, because strict rules for Python's values know neither tuples nor numbers as keys.
    c = _CALIBRATION.validate_json(json.dumps(found), strict=True)
    c = replace(c, kinds={kind: times for kind, times in c.kinds.items() if times})
    numbers = [n for n in asdict(c).values() if isinstance(n, int | float) and not isinstance(n, bool)]
    for times in c.kinds.values():
        numbers += [*times.keys(), *times.values()]
    if not all(_LEAST <= n <= _MOST for n in numbers) or c.io not in IO_MODES:
        raise ValueError("a number that no machine has, or no way to read")
    if not 1 <= (c.threads or 1) <= 256 or not 4096 <= (c.chunk or 4096) <= 1 << 30:
        raise ValueError("threads or chunk out of range")
    return c
