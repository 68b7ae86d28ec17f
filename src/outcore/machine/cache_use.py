"""Who uses what in the cache folder: whoever removes something asks first, and whoever uses it finds it whole.

A folder in use has a file that each of its users holds a shared lock on; whoever removes it takes that lock for itself,
and the one that a writer holds. The system gives a lock back however its process ends.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from ..errors import StoreError
from .cache_folder import cache_dir, make_cache, require_own

WRITER, USERS = ".lock", ".use"
"""Files in a folder: its writer holds the first one, those who use it the second one."""

_LOCKS = {WRITER: "being written", USERS: "in use"}
"""And what it is while one of them is held."""

REMOVED = "removed-"
"""What the name of a folder begins with that is going."""

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | getattr(os, "O_CLOEXEC", 0)

_held: dict[tuple[int, Path], int] = {}
"""By user and folder, the descriptor that holds the lock. This process, as a user, is 0."""


class InUseError(StoreError):
    """Something that a running process uses is not removed."""


def keep(folder: Path, user: object | None = None) -> None:
    """Have a folder in the cache stay as long as ``user`` lives; made if it is not there, elsewhere nothing is done.

    Waits for whoever removes it. Where nothing can be noted nothing can be removed either, as on a read-only disk.

    Args:
        user: an object; None: this process.
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
    """``keep`` for as long as the block runs; ``make``: also of a folder that is not there yet."""
    held = _hold(folder, make) if folder.is_relative_to(cache_dir()) else None
    try:
        yield
    finally:
        if held is not None:
            os.close(held)


def _hold(folder: Path, make: bool = True) -> int | None:
    """A descriptor that holds the users' lock, or None where there can be none."""
    while True:
        try:
            if folder.is_symlink():
                return None
            if make:
                try:
                    make_cache()
                except OSError:
                    return None  # nor by trying again
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(folder / USERS, _FLAGS, 0o600)
        except FileNotFoundError:
            if not make:
                return None
            continue  # it was removed in between
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
    """Whether the path still leads to what was opened."""
    try:
        return os.path.samestat(os.fstat(fd), path.lstat())
    except OSError:
        return False


def _inside(folder: Path) -> list[Path]:
    """Folders in a folder that are used by themselves, as a packed copy's drafts are."""
    with suppress(OSError):
        return [p for p in folder.iterdir() if not p.is_symlink() and any((p / name).exists() for name in _LOCKS)]
    return []


def state(folder: Path) -> str | None:
    """``in use`` or ``being written``; None: by no process that tells."""
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
    """Remove a folder of the cache that nobody uses. It is gone at once or not at all, and no link is followed.

    Raises:
        InUseError: a process uses it, or writes to it.
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
        # Under another name nobody finds half of it, however this process ends.
        going = cache_dir() / f"{REMOVED}{os.getpid()}-{folder.name}"
        folder.rename(going)
    shutil.rmtree(going)


def remove_empty(folder: Path) -> None:
    """Remove a folder of the cache in which nothing was written, if nobody uses it."""
    with suppress(OSError, StoreError):
        if all(path.name in _LOCKS for path in folder.iterdir()):
            remove_folder(folder)
