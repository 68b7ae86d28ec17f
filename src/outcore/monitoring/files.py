"""The snapshots of this user's running processes: ``<runtime folder>/outcore/<pid>.json``. Imports no MLX."""

from __future__ import annotations

import json
import os
import stat
import warnings
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
from platformdirs import PlatformDirs

from ..errors import StoreError

LONGEST = 1 << 20
"""Bytes of a snapshot; a longer file is none."""

CLOCK_S = 2.0
"""Seconds by which a process may seem to have begun after it wrote: the kernel tells its start by another clock."""


def runtime_folder() -> Path:
    """The folder, which need not exist."""
    with warnings.catch_warnings():
        # The system has made none for this user, and one in the folder for temporary files is taken.
        warnings.simplefilter("ignore")
        return PlatformDirs("outcore").user_runtime_path


def make_folder() -> Path:
    """The folder, made for this user alone if it is not there.

    Raises:
        StoreError: others could put something into it.
        OSError: it cannot be made.
    """
    folder = runtime_folder()
    for path in (folder.parent, folder):
        path.mkdir(mode=0o700, parents=path != folder, exist_ok=True)
    require_private(folder)
    return folder


def require_private(folder: Path) -> None:
    """Refuse a folder that is not this user's alone, or that others could replace by another one.

    Raises:
        StoreError: says which, and what to do.
        FileNotFoundError: it is not there.
    """
    me, status, above = os.geteuid(), folder.lstat(), folder.parent.stat()
    alone = stat.S_ISDIR(status.st_mode) and status.st_uid == me and not stat.S_IMODE(status.st_mode) & 0o077
    if not alone or above.st_uid not in (me, 0) or (above.st_mode & 0o022 and not above.st_mode & stat.S_ISVTX):
        raise StoreError(
            f"{folder}: the monitor's snapshots lie there, and others could look into it or replace it: "
            f"chmod 700 {folder}, or set XDG_RUNTIME_DIR to a folder of your own"
        )


def write(path: Path, document: dict[str, Any]) -> None:
    """Replace a snapshot by a newer one, so that a reader finds one of the two whole.

    Raises:
        OSError: it cannot be written.
    """
    new = path.with_suffix(".new")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(document, file, separators=(",", ":"))
    new.replace(path)


def read_all(pid: int | None = None) -> list[dict[str, Any]]:
    """The snapshots of this user's processes, or of one, lowest process number first. Files of processes that have
    ended are removed; what is no snapshot is left alone.

    Raises:
        StoreError: the folder is not this user's alone.
    """
    folder = runtime_folder()
    try:
        require_private(folder)
        names = [path.name for path in folder.iterdir()]
    except FileNotFoundError:
        return []
    pids = sorted(int(n.removesuffix(".json")) for n in names if n.endswith(".json") and n[:-5].isdecimal())
    found = (_read(n, folder / f"{n}.json") for n in pids if pid in (None, n))
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
