"""Finds copies of a model's folder on other disks, and compares them with it before anything is read from them.

File sizes must equal the model's, and before its first use every byte of a copy is compared once.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from outcore.checkpoint.checkpoint import Checkpoint
from outcore.checkpoint.identity import identity_of
from outcore.checkpoint.pack import Progress
from outcore.disk.layout import Extent
from outcore.disk.reader import FileReader
from outcore.errors import StoreError
from outcore.machine.cache_folder import cache_dir, keep_mark
from outcore.machine.small_files import state_of
from outcore.text import counted

from .mirrored_reader import MirroredReader, Replica, Replicas

COPY = "copy the folder again (cp -rL)"

PIECE = 32 << 20  # Bytes of each file that are compared at a time.

# The folder in the cache with an empty file for each finished comparison, and the version of these marks.
FOLDER, VERSION = "mirrors", 1


class FoundMirrors(Replicas):
    """The ``outcore.checkpoint.mirrors.Mirrors`` of a model."""

    def __init__(self, checkpoint: Checkpoint, mirrors: Sequence[Replica]) -> None:
        super().__init__(checkpoint.folder, mirrors)
        self._checkpoint = checkpoint

    def reader(self, files: Sequence[Path], **options: Any) -> MirroredReader:
        return MirroredReader(self, files, **options)

    def compare(self, check: Callable[[Sequence[Path]], None], progress: Progress) -> None:
        for mirror in self.mirrors:
            check(tuple((mirror.copies or {}).values()))
            compare_whole(mirror, self._checkpoint, progress)

    def about(self) -> tuple[str, ...]:
        notes, own = list[str](), self._checkpoint
        for mirror in self.mirrors:
            there = mirror.copies or {}
            if missing := len(own.files) - len(there):
                notes.append(f"{mirror.folder}: {counted(missing, 'file')} missing, read from {own.folder} alone")
            if any(state_of(file)[:1] == state_of(copy)[:1] for file, copy in there.items()):
                notes.append(f"{mirror.folder}: on the same disk as {own.folder}, so nothing is read faster")
        return tuple(notes)


def find_mirrors(named: Sequence[Path], checkpoint: Checkpoint) -> FoundMirrors:
    return FoundMirrors(checkpoint, [find_mirror(folder, checkpoint) for folder in named])


def find_mirror(named: Path, checkpoint: Checkpoint) -> Replica:
    """Finds the copies of a model's files in a folder, or in a subfolder with the model's name.

    Files that the folder lacks are read from the model's own folder alone; those that it has must be copies.

    Raises:
        StoreError: there is no copy, or a file differs from the model's in size, or is not a file of its own.
    """
    own = checkpoint.folder.absolute()
    try:
        named = named.expanduser()
    except RuntimeError as error:  # "~" and no user of that name
        raise StoreError(f"{named}: {error}") from error
    places = [named, named / own.name]
    if own.parent.name == "snapshots":  # the Hub's cache: models--owner--name/snapshots/<commit>
        places += [named / own.parent.parent.name / "snapshots" / own.name, named / own.parent.parent.name]
    files = [file.name for file in checkpoint.files]
    there = next((f for f in places if any(os.path.lexists(f / name) for name in files)), None)
    if there is None:
        raise StoreError(
            f"{named}: {'no copy of' if named.is_dir() else 'no such folder to mirror'} {checkpoint.folder}; "
            f"{files[0]}{' …' * (len(files) > 1)} must be in it or in {named / own.name}: copy the model's folder "
            "there (cp -rL), or mount the disk"
        )
    # Taken before the comparison, so that a change during it is noticed when the copy is opened.
    copies = {file: there / file.name for file in checkpoint.files if os.path.lexists(there / file.name)}
    states = {copy: state_of(copy) for copy in copies.values()}
    for file, copy in copies.items():
        try:
            size, wanted = copy.stat().st_size, file.stat().st_size
            why = f"{size} bytes, where {file} has {wanted}: {COPY}" if size != wanted else None
            if copy.samefile(file):
                why = "the model's own file: a mirror is a copy on another disk"
            elif not copy.is_file():
                why = f"not a regular file: {COPY}"
        except OSError as error:
            why = f"cannot be read ({error.strerror}): {COPY}"
        if why is not None:
            raise StoreError(f"{copy}: {why}")
    return Replica(there, copies, states)


def compare_whole(mirror: Replica, checkpoint: Checkpoint, progress: Progress) -> None:
    """Checks that a mirror has the model's bytes, unless an earlier comparison has found that; stores the result.

    Raises:
        StoreError: a byte differs; the message names it.
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
                        f"{copy}: differs from {file} at byte {where}: another version of the model, damaged or "
                        f"incomplete: {COPY}"
                    )
                done += n
    progress(what, total, total)
    if not any(mirror.changed(copy) for copy in mirror.copies.values()):
        keep_mark(known)


def _mark(mirror: Replica, checkpoint: Checkpoint) -> Path | None:
    """Returns the path of the file that marks a finished comparison of this state of mirror and model; None if the
    state cannot be read."""
    try:
        found = [(str(copy.resolve()), copy.stat()) for copy in (mirror.copies or {}).values()]
        # No device number, as it changes when a disk is plugged in again.
        states = [(name, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for name, s in found]
        key = repr([VERSION, identity_of(checkpoint), sorted(states)])
        return cache_dir() / FOLDER / xxhash.xxh3_128_hexdigest(key.encode())
    except (OSError, StoreError):
        return None
