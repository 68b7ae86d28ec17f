"""Where processes that can be watched are found: ``<runtime folder>/outcore/<pid>.sock``, this user's alone."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import warnings
from pathlib import Path

from platformdirs import PlatformDirs

from ..errors import StoreError

_ADVICE = "set XDG_RUNTIME_DIR to a folder of your own"

PATIENCE_S = 2.0
"""Seconds that connecting may take."""


def socket_folder() -> Path:
    """The folder, which need not be there."""
    with warnings.catch_warnings():
        # That the system has made none for this user, and one in the folder for temporary files is taken.
        warnings.simplefilter("ignore")
        return PlatformDirs("outcore").user_runtime_path


def make_folder() -> Path:
    """The folder, made if it is not there, for this user alone.

    Raises:
        StoreError: others could put something into it.
        OSError: it cannot be made.
    """
    folder = socket_folder()
    if not folder.parent.exists():
        # Where the system has made none, it lies in the folder for temporary files, where others may write.
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    require_private(folder)
    return folder


def require_private(folder: Path) -> None:
    """Refuse a folder that is not this user's alone, or that others could put another one in the place of.

    Raises:
        StoreError: says which, and what to do.
        FileNotFoundError: it is not there.
    """
    me = os.geteuid()
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise StoreError(f"{folder}: not a folder, but where the monitor's sockets should be; remove it")
    if status.st_uid != me:
        raise StoreError(f"{folder}: belongs to user {status.st_uid}, who decides what is in it; {_ADVICE}")
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise StoreError(f"{folder}: others may look into it; chmod 700 {folder}")
    above = folder.parent.stat()
    if above.st_uid not in (me, 0) or (above.st_mode & 0o022 and not above.st_mode & stat.S_ISVTX):
        raise StoreError(f"{folder.parent}: others may rename what is in it; {_ADVICE}")


def found(folder: Path | None = None) -> list[tuple[int, Path]]:
    """Process numbers and sockets of this user's processes, lowest first. Whether they are still there shows when they
    are connected to.

    Raises:
        StoreError: the folder is not this user's alone.
    """
    folder = folder or socket_folder()
    try:
        require_private(folder)
        names = [path.name for path in folder.iterdir()]
    except FileNotFoundError:
        return []
    numbers = sorted(int(n.removesuffix(".sock")) for n in names if n.endswith(".sock") and n[:-5].isdecimal())
    return [(pid, path) for pid in numbers if _own_socket(path := folder / f"{pid}.sock")]


def _own_socket(path: Path) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISSOCK(status.st_mode) and status.st_uid == os.geteuid()


def connect(path: Path) -> socket.socket | None:
    """A connection to a process; None: it is gone, and what it left is removed.

    Raises:
        OSError: it cannot be connected to; it may be too busy.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(PATIENCE_S)
        connection.connect(str(path))
    except (ConnectionRefusedError, FileNotFoundError):
        connection.close()
        path.unlink(missing_ok=True)
        return None
    except BaseException:
        connection.close()
        raise
    return connection


def remove_stale(folder: Path) -> None:
    """Remove what processes that are gone have left."""
    for _, path in found(folder):
        with contextlib.suppress(OSError):
            if (connection := connect(path)) is not None:
                connection.close()


def listen(folder: Path) -> tuple[socket.socket, Path]:
    """This process's socket, listening, at its place.

    Raises:
        OSError: it cannot be made; the path may be too long for one.
    """
    path = folder / f"{os.getpid()}.sock"
    # One that does not listen yet would be taken for one that was left over.
    new = folder / f"{os.getpid()}.new"
    new.unlink(missing_ok=True)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listening.setblocking(False)
        listening.bind(str(new))
        new.chmod(0o700)
        listening.listen(8)
        new.rename(path)
    except BaseException:
        listening.close()
        new.unlink(missing_ok=True)
        raise
    return listening, path
