"""The snapshots that this user's running processes write (``outcore.monitoring.files``), read. Imports no MLX."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from outcore.monitoring import files

LONGEST = 1 << 20
"""Bytes of a snapshot; a longer file is none."""

CLOCK_S = 2.0
"""Seconds by which a process may seem to have begun after it wrote: the kernel tells its start by another clock."""


def read_all() -> list[dict[str, Any]]:
    """The snapshots of this user's processes, lowest process number first. Files of processes that have ended are
    removed; what is no snapshot is left alone.

    Raises:
        StoreError: the folder is not this user's alone.
    """
    folder = files.runtime_folder()
    try:
        files.require_private(folder)
        names = [path.name for path in folder.iterdir()]
    except FileNotFoundError:
        return []
    pids = sorted(int(n.removesuffix(".json")) for n in names if n.endswith(".json") and n[:-5].isdecimal())
    found = (_read(n, folder / f"{n}.json") for n in pids)
    return [document for document in found if document is not None]


def _read(pid: int, path: Path) -> dict[str, Any] | None:
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                return None
            if not _wrote(pid, status.st_mtime):
                path.unlink(missing_ok=True)
                path.with_suffix(".new").unlink(missing_ok=True)
                return None
            document = json.loads(file.read(LONGEST))
    except (OSError, ValueError, RecursionError):
        return None
    # A newer version's may look otherwise: that is not shown.
    known = isinstance(document, dict) and document.get("type") == "snapshot" and document.get("pid") == pid
    return document if known else None


def _wrote(pid: int, at: float) -> bool:
    """Whether the process of that number still runs, and did when the file was written."""
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and bool(process.create_time() <= at + CLOCK_S)
    except psutil.Error:
        return False
