"""The cache folder for packed checkpoints and calibrations. Only its user may be able to write to it."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
from platformdirs import PlatformDirs

from ..errors import StoreError
from .settings import setting

# Folder of ``outcore chat --session``: NAME.json, and NAME.lock, which the running chat holds.
SESSIONS = "sessions"

_ADVICE = "set OUTCORE_CACHE to a folder of your own"


def cache_dir() -> Path:
    """Returns ``$OUTCORE_CACHE``, the configuration file's folder, or ``outcore`` in the user's cache folder.

    Raises:
        UsageError: the configuration file cannot be used.
        StoreError: another user could write to the folder; or there is no home folder.
    """
    try:
        own = setting("cache")
        path = Path(own.value).expanduser() if own else PlatformDirs("outcore").user_cache_path
    except RuntimeError as error:  # pathlib's and platformdirs's: no home folder
        raise StoreError(f"no folder for packed copies: {' '.join(str(error).split())[:200]}; {_ADVICE}") from error
    require_own(path)
    return path


def make_cache() -> Path:
    """Creates the cache folder for this user alone, and returns it.

    Raises:
        StoreError: as in ``cache_dir``.
        OSError: it cannot be created; names the setting that chose it.
    """
    path = cache_dir()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as e:
        named = setting("cache")
        where = "Outcore's cache folder" + (f", by {named.source}" if named is not None else "")
        raise OSError(e.errno, f"{e.strerror} ({where}); {_ADVICE}", str(path)) from e
    require_own(path)
    return path


def keep_mark(file: Path | None) -> None:
    """Creates an empty file in the cache folder that records a passed check, if it can."""
    if file is not None:
        with contextlib.suppress(OSError, StoreError):
            make_cache()
            file.parent.mkdir(mode=0o700, exist_ok=True)
            file.touch()


def require_own(path: Path) -> None:
    """Refuses an existing folder that other users could write to: its files decide what models answer.

    The superuser may use anyone's folder, since containers mount folders of other users. A folder that everyone or a
    group may write to is always refused.

    Raises:
        StoreError: it belongs to another user, everyone or its group may write to it, or it is not a folder.
    """
    me = os.geteuid()
    try:
        status = path.lstat()
        if stat.S_ISLNK(status.st_mode):
            if status.st_uid not in (0, me):
                raise StoreError(f"{path}: a link that user {status.st_uid} made; {_ADVICE}")
            status = path.stat()
    except FileNotFoundError:
        if path.is_symlink():
            raise StoreError(f"{path}: links to nothing; make that folder, or {_ADVICE}") from None
        return
    except OSError as error:
        raise StoreError(f"{path}: cannot be opened ({error.strerror}); {_ADVICE}") from error
    if not stat.S_ISDIR(status.st_mode):
        raise StoreError(f"{path}: not a folder; {_ADVICE}")
    if status.st_uid != me and me != 0:
        raise StoreError(f"{path}: belongs to user {status.st_uid}, who decides what is in it; {_ADVICE}")
    for others, bit, how in (("everyone", stat.S_IWOTH, "o-w"), ("its group", stat.S_IWGRP, "g-w")):
        if status.st_mode & bit:
            raise StoreError(f"{path}: {others} may write to it; chmod {how}, or {_ADVICE}")


def keep_document(path: Path, document: Any) -> None:
    """Writes a document as JSON into the cache folder, atomically.

    Raises:
        OSError, StoreError: it cannot be written.
    """
    make_cache()
    path.parent.mkdir(mode=0o700, exist_ok=True)
    require_own(path.parent)
    for abandoned in path.parent.glob(f"{path.name}.*.tmp"):  # left by killed processes
        number = abandoned.name.split(".")[-2]
        if number.isdecimal() and not psutil.pid_exists(int(number)):
            abandoned.unlink(missing_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps(document), encoding="utf-8")
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)
