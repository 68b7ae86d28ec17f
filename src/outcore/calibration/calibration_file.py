"""Calibrations on disk: one JSON file for each machine, device, version of MLX and disk, in the user's cache folder.

What was measured on other hardware or with another MLX, or written under another schema, is never used; the caller
learns why. Kinds of layers of several models gather in one file.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import xxhash
from pydantic import TypeAdapter

from ..errors import CalibrationError, StoreError
from ..machine.cache_folder import cache_dir, keep_document
from ..machine.hardware import cores, cpu_name, filesystem, gpu_name
from ..machine.packages import version
from ..machine.small_files import CONFIG_BYTES, parse_json, read_small
from ..options import IO_MODES
from ..plan.machine_profile import Calibration

FORMAT = "outcore-calibration"
SCHEMA, READ = 2, (1, 2)
"""The version that is written, and those that are read: of the first one what is in this one too."""

# What a calibration is for: another of these is another file. What it was measured on: another of these spoils it.
PLACE = ("device", "cpu_streams", "filesystem", "disk_gib", "mirror")
MADE_WITH = {"mlx": "MLX", "cpu": "processor", "cores": "number of cores", "memory_gib": "memory in GiB", "gpu": "GPU"}

_WANTED = {
    *("read_gbps", "read_latency_s", "sync_s", "weight_gbps", "io", "threads", "chunk", "kinds"),
}
_LEAST, _MOST = 1e-12, 1e12
"""Of any number in a calibration: no machine is slower or faster."""

_LIMITS = {"threads": (1, 256), "chunk": (4096, 1 << 30)}
_CALIBRATION = TypeAdapter(Calibration)

Key = Mapping[str, str | int | None]


def key_of(folder: Path, cpu_streams: int, mirror: bool = False) -> Key:
    """What tells machines and disks apart: names, sizes and versions.

    Args:
        folder: of a model, or one that does not exist yet: its nearest parent that does.
        cpu_streams: streams that linear layers are split over on the CPU device; 1 on a GPU.
        mirror: the folder is a mirror, and the calibration of its disk alone: one for each file system, as two disks of
            a kind are nothing special there.
    """
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    gpu = gpu_name()
    own = {"mirror": str(os.statvfs(folder).f_fsid)} if mirror else {}
    return own | {
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


def load_calibration(folder: Path, cpu_streams: int, mirror: bool = False) -> tuple[Calibration | None, str | None]:
    """The calibration of this machine and of the disk that ``folder`` is on. Raises nothing.

    Returns:
        The calibration, or None; and where one was found that cannot be used, why, as a phrase for the user.
    """
    try:
        key = key_of(folder, cpu_streams, mirror)
        path = file_of(key)
        return _read(path, key) if path.exists() else (None, _spoilt(path.parent, key))
    except OSError as e:
        return None, f"it cannot be read ({e.strerror})"
    except StoreError as e:
        return None, str(e)


def store_calibration(folder: Path, cpu_streams: int, calibration: Calibration, mirror: bool = False) -> Path:
    """Keep a calibration of this machine and of the disk that ``folder`` is on, and return its file.

    Kinds of layers that an earlier calibration knows and this one does not are kept.

    Raises:
        CalibrationError: the cache folder cannot be written, or others could write to it.
    """
    key = key_of(folder, cpu_streams, mirror)
    before, _ = load_calibration(folder, cpu_streams, mirror)
    kinds = {**(before.kinds if before is not None else {}), **calibration.kinds}
    document = {
        "format": FORMAT,
        "schema": SCHEMA,
        "key": key,
        "calibration": asdict(replace(calibration, kinds=kinds)),
    }
    try:
        path = file_of(key)
        keep_document(path, document)
    except StoreError as e:
        raise CalibrationError(f"the calibration cannot be kept: {e}") from e
    except OSError as e:
        advice = "" if "OUTCORE_CACHE" in str(e.strerror) else "; set OUTCORE_CACHE to a folder that can be written"
        raise CalibrationError(f"{path.parent}: the calibration cannot be kept: {e.strerror}{advice}") from e
    return path


def _read(path: Path, key: Key) -> tuple[Calibration | None, str | None]:
    try:
        document = parse_json(read_small(path, CONFIG_BYTES), twins=False)
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            return None, "its file is damaged"
        if document.get("schema") not in READ:
            return None, f"it was written by another version of Outcore (schema {document.get('schema')!s:.20})"
        if document.get("key") != dict(key):
            return None, "its file is of another machine"
        return _calibration(document.get("calibration")), None
    except ValueError:  # neither JSON nor UTF-8, or not a calibration
        return None, "its file is damaged"


def _calibration(found: Any) -> Calibration:
    """A calibration from what JSON makes of one, every value of the type that its class says, none converted.

    Raises:
        ValueError: it is none, or nothing could be computed with it.
    """
    if not isinstance(found, dict) or _WANTED - found.keys():
        raise ValueError("not all of a calibration")
    # As JSON again, because strict rules for Python's values know neither tuples nor numbers as keys.
    calibration = _CALIBRATION.validate_json(json.dumps(found), strict=True)
    calibration = replace(calibration, kinds={kind: times for kind, times in calibration.kinds.items() if times})
    values = asdict(calibration)
    if not all(_LEAST <= n <= _MOST for n in _numbers(values)):
        raise ValueError("a number that no machine has")
    for name, (least, most) in _LIMITS.items():
        if values[name] is not None and not least <= values[name] <= most:
            raise ValueError(f"{name} out of range")
    if calibration.io not in IO_MODES:
        raise ValueError(f"{calibration.io!r} is no way to read")
    return calibration


def _numbers(value: Any) -> Iterator[float]:
    """Every number in nested dictionaries and tuples, their keys too."""
    if isinstance(value, Mapping):
        yield from _numbers([*value.keys(), *value.values()])
    elif isinstance(value, list | tuple):
        for inside in value:
            yield from _numbers(inside)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value


def _spoilt(folder: Path, key: Key) -> str | None:
    """Why a calibration for the same device and disk is not this machine's as it is now; None where there is none."""
    reasons: list[list[str]] = []
    for path in folder.glob("*.json"):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            other = parse_json(read_small(path, CONFIG_BYTES)).get("key", {})
            if all(other.get(name) == key.get(name) for name in PLACE):
                differing = [name for name in MADE_WITH if other.get(name) != key[name]]
                reasons.append([f"{MADE_WITH[n]} was {other.get(n)!s:.60}, is {key[n]}" for n in differing])
    least = min(reasons, key=len, default=[])
    return "; ".join(least) or None
