"""Copies of a model's folder on other disks: compared with it before anything is read from them.

Whatever a copy says of itself does not count. The size of each of its files must be that of the model's own. Before the
first answer every byte is compared, once.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import xxhash

from ..disk.layout import Extent
from ..disk.open_file import state_of
from ..disk.reader import FileReader
from ..disk.replica import Replica
from ..errors import StoreError
from ..machine.cache_folder import cache_dir, make_cache
from ..text import counted
from .checkpoint import Checkpoint

COPY = "copy the folder again (cp -rL)"

PIECE = 32 << 20
"""Bytes of each file that are compared at a time."""

FOLDER, VERSION = "mirrors", 1
"""Of the cache folder: marks of mirrors that were compared."""

Progress = Callable[[str, int, int], None]


def find_mirror(named: Path, checkpoint: Checkpoint) -> Replica:
    """The copies of a model's files in a folder, or in one of the model's name within it.

    Files that are not there are read from the model's own folder alone; one that is there must be a copy.

    Raises:
        StoreError: there is no copy, or one that is no copy of the model as it is now; names it and says why.
    """
    try:
        named = named.expanduser()
    except RuntimeError as error:  # "~" and no user of that name
        raise StoreError(f"{named}: {error}") from error
    if not named.is_dir():
        raise StoreError(
            f"{named}: no such folder to mirror {checkpoint.folder}: copy that there (cp -rL), or mount it"
        )
    files = [file.name for file in checkpoint.files]
    there = next((f for f in _places(named, checkpoint) if any(os.path.lexists(f / name) for name in files)), None)
    if there is None:
        names = f"{files[0]}{' …' * (len(files) > 1)}"
        raise StoreError(
            f"{named}: no copy of {checkpoint.folder}, whose {names} would lie in it or in "
            f"{named / checkpoint.folder.name}: copy that folder there (cp -rL)"
        )
    # Looked at first: what changes while it is compared is noticed when it is opened.
    copies = {file: there / file.name for file in checkpoint.files if os.path.lexists(there / file.name)}
    states = {copy: state_of(copy) for copy in copies.values()}
    for file, copy in copies.items():
        if (why := _difference(file, copy)) is not None:
            raise StoreError(f"{copy}: {why}")
    return Replica(there, copies, states)


def compare_whole(mirror: Replica, checkpoint: Checkpoint, progress: Progress = lambda *_: None) -> None:
    """See that every byte of a mirror is the model's, unless that was found before; what was found is kept.

    Raises:
        StoreError: one is not (named).
        ReadError: a file cannot be read.
    """
    assert mirror.copies is not None
    known = _mark(mirror, checkpoint)
    with contextlib.suppress(OSError):
        if known is not None and known.exists():
            return
    what, total = f"comparing {mirror.folder}", sum(file.stat().st_size for file in mirror.copies)
    done = 0
    buffers = [memoryview(mmap.mmap(-1, PIECE)) for _ in range(2)]
    for file, copy in mirror.copies.items():
        size = file.stat().st_size
        with contextlib.closing(FileReader([file, copy])) as reader:
            for at in range(0, size, PIECE):
                progress(what, done, total)
                n = min(PIECE, size - at)
                both = list(zip((file, copy), buffers, strict=True))
                for read in [reader.submit("compare", [Extent(path, at, n, 0, True)], to) for path, to in both]:
                    read.wait()
                ours, theirs = (np.frombuffer(buffer[:n], dtype=np.uint8) for buffer in buffers)
                if not np.array_equal(ours, theirs):
                    where = at + int(np.argmax(ours != theirs))
                    raise StoreError(
                        f"{copy}: byte {where} is not as in {file}: of another version of the model, damaged, or not "
                        f"whole: {COPY}"
                    )
                done += n
    progress(what, total, total)
    if known is not None and not any(mirror.changed(copy) for copy in mirror.copies.values()):
        with contextlib.suppress(OSError, StoreError):
            make_cache()
            known.parent.mkdir(mode=0o700, exist_ok=True)
            known.touch()


def _mark(mirror: Replica, checkpoint: Checkpoint) -> Path | None:
    """The file that is there once a mirror was compared, as it and the model are now; None where none can be kept."""
    try:
        found = [(str(copy.resolve()), copy.stat()) for copy in (mirror.copies or {}).values()]
        # No number of a device: a disk gets another one when it is plugged in again.
        states = [(name, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for name, s in found]
        key = repr([VERSION, checkpoint.identity(), sorted(states)])
        return cache_dir() / FOLDER / xxhash.xxh3_128_hexdigest(key.encode())
    except (OSError, StoreError):
        return None


def about(mirror: Replica, checkpoint: Checkpoint) -> tuple[str, ...]:
    """What a user should know of a mirror."""
    notes, own = [], checkpoint.folder
    if missing := len(checkpoint.files) - len(mirror.copies or {}):
        notes.append(f"{mirror.folder}: {counted(missing, 'file')} not there, and read from {own} alone")
    if same_disk(mirror):
        notes.append(f"{mirror.folder}: on the same disk as {own}, so nothing is read faster")
    return tuple(notes)


def same_disk(mirror: Replica) -> bool:
    """Whether it lies on a file system that the model's own files lie on."""
    copies = mirror.copies or {}
    disks = [(state_of(file)[:1], state_of(copy)[:1]) for file, copy in copies.items()]
    return any(own == other for own, other in disks)


def _places(named: Path, checkpoint: Checkpoint) -> Sequence[Path]:
    folder = checkpoint.folder.absolute()
    found = [named, named / folder.name]
    if folder.parent.name == "snapshots":  # the Hub's cache: models--owner--name/snapshots/<commit>
        found.append(named / folder.parent.parent.name / "snapshots" / folder.name)
        found.append(named / folder.parent.parent.name)
    return found


def _difference(file: Path, copy: Path) -> str | None:
    """Why one file is no copy of the other, which has the same bytes; None: it may be one."""
    try:
        if not copy.exists():
            return f"a link to {copy.readlink()}, which is not there: {COPY}"
        if not copy.is_file():
            return f"not a regular file: {COPY}"
        if copy.samefile(file):
            return "the model's own file: a mirror is a copy on another disk"
        size, own = copy.stat().st_size, file.stat().st_size
        return f"{size} bytes, where {file} has {own}: {COPY}" if size != own else None
    except OSError as error:
        return f"cannot be read ({error.strerror})"
