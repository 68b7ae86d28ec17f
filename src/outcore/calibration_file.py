"""Calibrations on disk: one JSON file for each machine, device, version of MLX and disk, in the user's cache folder.

What was measured on other hardware or with another MLX, or written under another schema, is never used; the caller
learns why. Kinds of layers of several models gather in one file.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import xxhash

from .calibration import Calibration, Conditions, DiskPoint
from .cpu_streams import cores
from .errors import CalibrationError
from .hardware import cpu_name, filesystem, gpu_name
from .reader import IO_MODES
from .store import cache_dir

FORMAT = "outcore-calibration"
SCHEMA = 1

# What a calibration is for: another of these is another file. What it was measured on: another of these spoils it.
PLACE = ("device", "cpu_streams", "filesystem", "disk_gib")
MADE_WITH = {"mlx": "MLX", "cpu": "processor", "cores": "number of cores", "memory_gib": "memory in GiB", "gpu": "GPU"}

_RATES = ("read_gbps", "read_latency_s", "sync_s", "read_slowdown", "compute_slowdown", "weight_gbps")

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


def load_calibration(folder: Path, cpu_streams: int) -> tuple[Calibration | None, str | None]:
    """The calibration of this machine and of the disk that ``folder`` is on. Raises nothing.

    Returns:
        The calibration, or None; and where one was found that cannot be used, why, as a phrase for the user.
    """
    try:
        key = key_of(folder, cpu_streams)
        path = file_of(key)
        if path.exists():
            return _read(path, key)
        return None, _spoilt(path.parent, key)
    except OSError as e:
        return None, f"it cannot be read ({e.strerror})"


def store_calibration(folder: Path, cpu_streams: int, calibration: Calibration) -> Path:
    """Keep a calibration of this machine and of the disk that ``folder`` is on, and return its file.

    Kinds of layers that an earlier calibration knows and this one does not are kept.

    Raises:
        CalibrationError: the cache folder cannot be written.
    """
    key = key_of(folder, cpu_streams)
    path = file_of(key)
    before, _ = load_calibration(folder, cpu_streams)
    if before is not None:
        known = {kind: c for kind, c in before.kind_conditions.items() if kind not in calibration.kinds}
        calibration = replace(
            calibration,
            kinds={**before.kinds, **calibration.kinds},
            kind_conditions={**known, **calibration.kind_conditions},
        )
    document = {"format": FORMAT, "schema": SCHEMA, "key": key, "calibration": asdict(calibration)}
    temporary = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_text(json.dumps(document, indent=1), encoding="utf-8")
            temporary.rename(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as e:
        raise CalibrationError(
            f"{path.parent}: the calibration cannot be kept: {e.strerror}; set OUTCORE_CACHE to a folder that can be "
            "written"
        ) from e
    return path


def merge(
    calibration: Calibration, kinds: Mapping[str, Mapping[int, float]], conditions: Conditions | None = None
) -> Calibration:
    """The calibration with these kinds of layers as well; what it had of the same kinds gives way."""
    known = {kind: c for kind, c in calibration.kind_conditions.items() if kind not in kinds}
    new = {} if conditions is None else dict.fromkeys(kinds, conditions)
    return replace(calibration, kinds={**calibration.kinds, **kinds}, kind_conditions=known | new)


def file_of(key: Key) -> Path:
    """Where the calibration of that key lies, or would."""
    digest = xxhash.xxh64_hexdigest(json.dumps(dict(key), sort_keys=True).encode())
    return cache_dir() / "calibration" / f"{digest}.json"


def _read(path: Path, key: Key) -> tuple[Calibration | None, str | None]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:  # neither JSON nor UTF-8
        return None, "its file is damaged"
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        return None, "its file is damaged"
    if document.get("schema") != SCHEMA:
        return None, f"it was written by another version of Outcore (schema {document.get('schema')!s:.20})"
    if document.get("key") != dict(key):
        return None, "its file is of another machine"
    try:
        return _calibration(document["calibration"]), None
    except (KeyError, TypeError, ValueError, AttributeError):
        return None, "its file is damaged"


def _calibration(found: Mapping[str, Any]) -> Calibration:
    """A calibration from what JSON makes of one. Raises ValueError and its like where it is none."""
    names = {f.name for f in fields(Calibration)}
    values = {name: value for name, value in found.items() if name in names}
    values["kinds"] = {
        kind: {int(n): _positive(s) for n, s in times.items()} for kind, times in found["kinds"].items() if times
    }
    values["disk_points"] = tuple(DiskPoint(**point) for point in found["disk_points"])
    # Files that were written before these were known are still good: then nothing is known of it.
    disk, product = found.get("disk_conditions"), found.get("product_s")
    values["disk_conditions"] = None if disk is None else _conditions(disk)
    values["kind_conditions"] = {kind: _conditions(c) for kind, c in found.get("kind_conditions", {}).items()}
    values["product_s"] = None if product is None else _positive(product)
    for name in _RATES:
        values[name] = _positive(found[name])
    for name in ("threads", "chunk", "slots"):
        if found[name] is not None:
            values[name] = int(_positive(found[name]))
    if found["io"] not in IO_MODES:
        raise ValueError(f"{found['io']!r} is no way to read")
    return Calibration(**values)


def _conditions(found: Mapping[str, Any]) -> Conditions:
    load = found["load"]
    if load is not None and not 0 <= load <= 1:
        raise ValueError(f"{load!r} is no share of the cores")
    if isinstance(found["spread"], bool) or not 0 <= found["spread"] < math.inf:
        raise ValueError(f"{found['spread']!r} is no spread")
    return Conditions(_positive(found["at"]), None if load is None else float(load), float(found["spread"]))


def _positive(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"{value!r} is no positive number")
    return float(value)


def _spoilt(folder: Path, key: Key) -> str | None:
    """Why a calibration for the same device and disk is not this machine's as it is now; None where there is none."""
    reasons: list[list[str]] = []
    for path in folder.glob("*.json"):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            other = json.loads(path.read_text(encoding="utf-8")).get("key", {})
            if all(other.get(name) == key[name] for name in PLACE):
                differing = [name for name in MADE_WITH if other.get(name) != key[name]]
                reasons.append([f"{MADE_WITH[n]} was {other.get(n)!s:.60}, is {key[n]}" for n in differing])
    least = min(reasons, key=len, default=[])
    return "; ".join(least) or None
