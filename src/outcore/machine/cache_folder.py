"""The cache folder for packed checkpoints and calibrations. Only its user may be able to write to it.

A process that uses a folder in it takes a shared lock on a file there. Removing the folder requires that lock
exclusively, and the writer's lock too. The system releases locks when a process ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import stat
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
from platformdirs import PlatformDirs

from ..errors import StoreError
from .settings import setting

# Folder of ``outcore chat --session``: NAME.json, and NAME.lock, which the running chat locks.
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
    except RuntimeError as error:  # pathlib and platformdirs raise it if there is no home folder
        raise StoreError(f"no cache folder: {' '.join(str(error).split())[:200]}; {_ADVICE}") from error
    require_own(path)
    return path


def make_cache() -> Path:
    """Creates the cache folder for this user alone, and returns it.

    Raises:
        StoreError: as in ``cache_dir``.
        OSError: it cannot be created; the message names the setting that chose it.
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
    """Raises an error for an existing folder that other users could write to: its files decide what models answer.

    The superuser may use anyone's folder, since containers mount folders of other users, but no folder that everyone or
    its group may write to.

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


# Lock files in a folder: the writer's, and the users'.
WRITER, USERS = ".lock", ".use"

# What ``state`` returns while a process has the lock.
_LOCKS = {WRITER: "being written", USERS: "in use"}

# Start of the name of a folder that is being removed.
REMOVED = "removed-"

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | getattr(os, "O_CLOEXEC", 0)

# Descriptors of locked files, by ``id()`` of the user (0: the process) and folder.
_held: dict[tuple[int, Path], int] = {}


class InUseError(StoreError):
    """A folder cannot be removed because a running process uses it."""


def keep(folder: Path, user: object | None = None) -> None:
    """Protects a folder of the cache from removal as long as ``user`` lives, and creates it if missing.

    Waits while another process removes it. Does nothing outside the cache folder, and on a read-only disk, where no
    process can remove anything.

    Args:
        user: any object; None: until this process ends.
    """
    key = (0 if user is None else id(user), folder)
    if key in _held or not folder.is_relative_to(cache_dir()):
        return
    held = _hold(folder)
    if held is not None:
        _held[key] = held
        if user is not None:
            weakref.finalize(user, _give_back, key)


def _give_back(key: tuple[int, Path]) -> None:
    os.close(_held.pop(key))


@contextmanager
def kept(folder: Path, *, make: bool = True) -> Iterator[None]:
    """Protects a folder while the block runs; ``make``: creates it if missing."""
    held = _hold(folder, make) if folder.is_relative_to(cache_dir()) else None
    try:
        yield
    finally:
        if held is not None:
            os.close(held)


def _hold(folder: Path, make: bool = True) -> int | None:
    """Takes the users' lock and returns its descriptor; None if locking is impossible."""
    while True:
        try:
            if folder.is_symlink():
                return None
            if make:
                try:
                    make_cache()
                except OSError:
                    return None  # retrying would not help
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(folder / USERS, _FLAGS, 0o600)
        except FileNotFoundError:
            if not make:
                return None
            continue  # the folder was removed after ``mkdir``
        except OSError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_SH)
            if _is(fd, folder / USERS):
                os.utime(fd)
                return fd
        except OSError:
            os.close(fd)
            return None
        os.close(fd)


def _is(fd: int, path: Path) -> bool:
    """Whether the path still names the opened file."""
    try:
        return os.path.samestat(os.fstat(fd), path.lstat())
    except OSError:
        return False


def _inside(folder: Path) -> list[Path]:
    """Returns subfolders with locks of their own, such as a packed checkpoint's drafts."""
    with suppress(OSError):
        return [p for p in folder.iterdir() if not p.is_symlink() and any((p / name).exists() for name in _LOCKS)]
    return []


def state(folder: Path) -> str | None:
    """Returns ``in use`` or ``being written``; None if no process has locked the folder."""
    for lock, what in ((p / n, w) for p in (folder, *_inside(folder)) for n, w in _LOCKS.items()):
        with suppress(OSError):
            fd = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | getattr(os, "O_CLOEXEC", 0))
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return what
            finally:
                os.close(fd)
    return None


def remove_folder(folder: Path) -> None:
    """Removes an unused folder of the cache atomically, following no links.

    Raises:
        InUseError: a process uses it or writes to it.
        OSError: it cannot be removed.
    """
    if folder.is_symlink():
        raise InUseError(f"{folder}: a link, which Outcore never makes; it is left alone")
    require_own(folder)
    with ExitStack() as locks:
        for path, name in ((p, n) for p in (folder, *_inside(folder)) for n in _LOCKS):
            fd = os.open(path / name, _FLAGS, 0o600)
            locks.callback(os.close, fd)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as e:
                what = f"{path.relative_to(folder.parent)} is {_LOCKS[name]}"
                raise InUseError(f"{what} by a running process; try again when that has ended") from e
            if not _is(fd, path / name):
                raise FileNotFoundError(f"{path}: removed meanwhile")
        # Renamed first, so that no process finds a half-removed folder.
        going = cache_dir() / f"{REMOVED}{os.getpid()}-{folder.name}"
        folder.rename(going)
    shutil.rmtree(going)


def remove_empty(folder: Path) -> None:
    """Removes a folder of the cache if it contains only lock files and is unused."""
    with suppress(OSError, StoreError):
        if all(path.name in _LOCKS for path in folder.iterdir()):
            remove_folder(folder)
