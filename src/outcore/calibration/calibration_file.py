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
from ..machine.cache_folder import cache_dir, make_cache
from ..machine.hardware import cores, cpu_name, filesystem, gpu_name
from ..machine.packages import version
from ..machine.small_files import CONFIG_BYTES, parse_json, read_small
from ..options import IO_MODES
from ..plan.machine_profile import Calibration, Conditions

FORMAT = "outcore-calibration"
SCHEMA = 1

# What a calibration is for: another of these is another file. What it was measured on: another of these spoils it.
PLACE = ("device", "cpu_streams", "filesystem", "disk_gib", "mirror")
MADE_WITH = {"mlx": "MLX", "cpu": "processor", "cores": "number of cores", "memory_gib": "memory in GiB", "gpu": "GPU"}

_WANTED = {
    *("read_gbps", "read_latency_s", "sync_s", "read_slowdown", "compute_slowdown", "weight_gbps"),
    *("io", "threads", "chunk", "kinds", "disk_points"),
}
_TEMPORARY = ".partial"

_LEAST, _MOST = 1e-12, 1e12
"""Of any number in a calibration: no machine is slower or faster."""

_LIMITS = {"threads": (1, 256), "chunk": (4096, 1 << 30)}

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


def load_calibration(folder: Path, cpu_streams: int, mirror: bool = False) -> tuple[Calibration | None, str | None]:
    """The calibration of this machine and of the disk that ``folder`` is on. Raises nothing.

    Returns:
        The calibration, or None; and where one was found that cannot be used, why, as a phrase for the user.
    """
    try:
        key = key_of(folder, cpu_streams, mirror)
        path = file_of(key)
        if path.exists():
            return _read(path, key)
        return None, _spoilt(path.parent, key)
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
    try:
        path = file_of(key)
    except StoreError as e:
        raise CalibrationError(f"the calibration cannot be kept: {e}") from e
    before, _ = load_calibration(folder, cpu_streams, mirror)
    if before is not None:
        known = {kind: c for kind, c in before.kind_conditions.items() if kind not in calibration.kinds}
        calibration = replace(
            calibration,
            kinds={**before.kinds, **calibration.kinds},
            parts={**before.parts, **calibration.parts},
            kind_conditions={**known, **calibration.kind_conditions},
        )
    document = {
        "format": FORMAT,
        "schema": SCHEMA,
        "key": key,
        "calibration": asdict(replace(calibration, corrections={})),
    }
    temporary = path.with_name(f"{path.name}.{os.getpid()}{_TEMPORARY}")
    try:
        make_cache()
        path.parent.mkdir(mode=0o700, exist_ok=True)
        _remove_abandoned(path.parent)
        try:
            temporary.write_text(json.dumps(document, indent=1), encoding="utf-8")
            temporary.rename(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as e:
        advice = "" if "OUTCORE_CACHE" in str(e.strerror) else "; set OUTCORE_CACHE to a folder that can be written"
        raise CalibrationError(f"{path.parent}: the calibration cannot be kept: {e.strerror}{advice}") from e
    return path


def _remove_abandoned(folder: Path) -> None:
    """Remove what processes that were killed had begun to write."""
    for path in folder.glob(f"*{_TEMPORARY}"):
        number = path.name.removesuffix(_TEMPORARY).rpartition(".")[2]
        if number.isdecimal() and not psutil.pid_exists(int(number)):
            path.unlink(missing_ok=True)


def merge(
    calibration: Calibration,
    kinds: Mapping[str, Mapping[int, float]],
    conditions: Conditions | None = None,
    parts: Mapping[str, float] | None = None,
) -> Calibration:
    """The calibration with these kinds of layers as well; what it had of the same kinds gives way."""
    more = {kind: s for kind, s in calibration.parts.items() if kind not in kinds} | dict(parts or {})
    known = {kind: c for kind, c in calibration.kind_conditions.items() if kind not in kinds}
    new = {} if conditions is None else dict.fromkeys(kinds, conditions)
    return replace(calibration, kinds={**calibration.kinds, **kinds}, parts=more, kind_conditions=known | new)


def file_of(key: Key) -> Path:
    """Where the calibration of that key lies, or would."""
    digest = xxhash.xxh64_hexdigest(json.dumps(dict(key), sort_keys=True).encode())
    return cache_dir() / "calibration" / f"{digest}.json"


def _read(path: Path, key: Key) -> tuple[Calibration | None, str | None]:
    try:
        document = parse_json(read_small(path, CONFIG_BYTES), twins=False)
    except ValueError:  # neither JSON nor UTF-8
        return None, "its file is damaged"
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        return None, "its file is damaged"
    if document.get("schema") != SCHEMA:
        return None, f"it was written by another version of Outcore (schema {document.get('schema')!s:.20})"
    if document.get("key") != dict(key):
        return None, "its file is of another machine"
    try:
        return _calibration(document.get("calibration")), None
    except ValueError:
        return None, "its file is damaged"


_CALIBRATION = TypeAdapter(Calibration)


def _calibration(found: Any) -> Calibration:
    """A calibration from what JSON makes of one, every value of the type that its class says, none converted.

    Raises:
        ValueError: it is none, or nothing could be computed with it.
    """
    if not isinstance(found, dict) or _WANTED - found.keys():
        raise ValueError("not all of a calibration")
    # As JSON again, because strict rules for Python's values know neither tuples nor numbers as keys.
    calibration = _CALIBRATION.validate_json(json.dumps(found), strict=True)
    kinds = {kind: times for kind, times in calibration.kinds.items() if times}
    calibration = replace(calibration, kinds=kinds, corrections={})
    conditions = [*calibration.kind_conditions.values(), calibration.disk_conditions]
    if not all(c is None or _possible(c) for c in conditions):
        raise ValueError("conditions that cannot have been")
    values = asdict(replace(calibration, disk_conditions=None, kind_conditions={}))
    if not all(_LEAST <= n <= _MOST for n in _numbers(values)):
        raise ValueError("a number that no machine has")
    for name, (least, most) in _LIMITS.items():
        if values[name] is not None and not least <= values[name] <= most:
            raise ValueError(f"{name} out of range")
    if calibration.io not in IO_MODES:
        raise ValueError(f"{calibration.io!r} is no way to read")
    return calibration


def _possible(conditions: Conditions) -> bool:
    load, spread = conditions.load, conditions.spread
    return 0 < conditions.at <= _MOST and (load is None or 0 <= load <= 1) and 0 <= spread <= _MOST


def _numbers(value: Any) -> Iterator[float]:
    """Every number in nested dictionaries and tuples, their keys too."""
    if isinstance(value, Mapping):
        for key, inside in value.items():
            yield from _numbers(key)
            yield from _numbers(inside)
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
