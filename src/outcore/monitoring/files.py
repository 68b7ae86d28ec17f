"""The files of snapshots, ``<runtime folder>/outcore/<pid>.json``, one per running process. Imports no MLX."""

from __future__ import annotations

import json
import os
import stat
import warnings
from pathlib import Path
from typing import Any

from platformdirs import PlatformDirs

from ..errors import StoreError


def runtime_folder() -> Path:
    with warnings.catch_warnings():
        # platformdirs warns when the system has no runtime folder and it falls back to the temporary folder.
        warnings.simplefilter("ignore")
        return PlatformDirs("outcore").user_runtime_path


def make_folder() -> Path:
    """Makes the folder, private to this user, if it does not exist.

    Raises:
        StoreError: other users can access the folder or replace it.
        OSError: the folder cannot be made.
    """
    folder = runtime_folder()
    for path in (folder.parent, folder):
        path.mkdir(mode=0o700, parents=path != folder, exist_ok=True)
    require_private(folder)
    return folder


def require_private(folder: Path) -> None:
    """Checks that only this user can access the folder and replace it.

    Raises:
        StoreError: other users can.
        FileNotFoundError: there is no such folder.
    """
    me, status, above = os.geteuid(), folder.lstat(), folder.parent.stat()
    alone = stat.S_ISDIR(status.st_mode) and status.st_uid == me and not stat.S_IMODE(status.st_mode) & 0o077
    if not alone or above.st_uid not in (me, 0) or (above.st_mode & 0o022 and not above.st_mode & stat.S_ISVTX):
        raise StoreError(
            f"{folder}: other users can access the monitor's snapshots here; run chmod 700 {folder}, or set "
            "XDG_RUNTIME_DIR to a folder of your own"
        )


def write(path: Path, document: dict[str, Any]) -> None:
    """Replaces a snapshot atomically: a reader finds the old one or the new one."""
    new = path.with_suffix(".new")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(document, file, separators=(",", ":"))
    new.replace(path)
