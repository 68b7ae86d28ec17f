"""Where the snapshots of this user's running processes are: ``<runtime folder>/outcore/<pid>.json``. Imports no MLX."""

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
