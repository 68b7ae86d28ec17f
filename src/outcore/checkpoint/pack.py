"""Writes packed copies in bounded memory; an interrupted pack resumes.

Tensors that lie unchanged in the original are copied byte by byte; those changed by ``sanitize`` are computed by MLX,
one parameter at a time, in the calling thread. A file gets its final name only when all its bytes are on the disk.
"""

from __future__ import annotations

import errno
import gc
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import xxhash
from filelock import lock_descriptor

from ..disk import disk_calls
from ..errors import StoreError, StoreSpaceError
from ..machine.allocator import clear_cache
from ..machine.cache_folder import WRITER as _LOCK
from ..machine.cache_folder import cache_dir, keep, make_cache, require_own
from ..machine.written import wrote
from ..modules.layers import Layer, named_parameters
from ..sizes import format_size
from .checkpoint import Checkpoint, open_checkpoint
from .identity import identity_of
from .lazy_model import LazyModel
from .manifest import (
    FILE_NAME,
    FORMAT,
    FULL,
    MANIFEST,
    OVERLAY,
    PARTIAL_MANIFEST,
    PLAIN,
    PLAIN_SCHEMA,
    SCHEMA,
    Manifest,
    Record,
    is_packed,
    read_manifest,
)
from .packed_bytes import PackedFile, Pieces, Plain, file_content
from .packed_store import Overlay, open_again, overlay, source_of, whole_files

Progress = Callable[[str, int, int], None]  # called with a description, bytes done, and total bytes

OTHER = "packed from another model, or by other versions of MLX, mlx-lm or Outcore; give another folder, or --force"

_TEMPORARY = ".partial"
_BEGUN = {_LOCK, PARTIAL_MANIFEST + _TEMPORARY}  # All that a folder can hold before its first manifest.

_FULL_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FREE = "free some, or set OUTCORE_CACHE to a folder on another disk; what is finished is kept"


def pack_overlay(
    lazy: LazyModel, layers: Sequence[Layer], planned: Overlay | None = None, progress: Progress | None = None
) -> None:
    """Write the overlay's files for these layers: the parameters that ``sanitize`` changed. Keeps files that are whole.

    MLX computes the parameters from a second, lazily opened model. Takes memory for about one layer.

    Args:
        planned: ``overlay(lazy)``, called before the model's lazy arrays were replaced or cast; None: they have not
            been.

    Raises:
        StoreSpaceError: the disk is too full; finished files are kept.
        StoreError: the overlay cannot be written, or the model on disk has changed meanwhile.
    """
    folder, files = planned or overlay(lazy)
    paths = {layer.path for layer in layers}
    wanted = [file for file in files if file.unit in paths]
    if wanted:
        keep(folder, lazy.model)
        pack_files(
            OVERLAY, folder, lazy.checkpoint, files, wanted, lambda: dict(plain_pieces(open_again(lazy))), progress
        )


def pack_files(
    kind: Literal["overlay", "draft"],
    folder: Path,
    checkpoint: Checkpoint,
    files: Sequence[PackedFile],
    wanted: Sequence[PackedFile],
    open_pieces: Callable[[], Pieces],
    progress: Progress | None = None,
) -> None:
    """Write those of the ``wanted`` files that are missing or damaged. ``files``: all that the copy may ever have.
    Raises as ``pack_overlay``."""
    source = source_of(checkpoint)
    if len(whole_files(folder, MANIFEST, wanted, source)) < len(wanted):
        manifest = Manifest(kind=kind, source=source, files={})
        PackWriter(folder, checkpoint, manifest, files, wanted, progress).run(open_pieces)


def plain_pieces(lazy: LazyModel) -> dict[str, Plain]:
    # Arrays with a place on disk are dropped: evaluating an array made from them would keep them in memory.
    return {path: lazy.origins.get(path, array) for path, array in named_parameters(lazy.model)}


@dataclass
class PackWriter:
    """Writes one packed copy.

    Attributes:
        manifest: the manifest to write, without its list of files.
        files: all files that the copy may have; ``wanted``: those that it must have.
        force: whether to write existing files again.
        extra: bytes that ``run``'s ``finish`` will write.
    """

    folder: Path
    checkpoint: Checkpoint
    manifest: Manifest
    files: Sequence[PackedFile]
    wanted: Sequence[PackedFile]
    progress: Progress | None
    force: bool = False
    extra: int = 0
    done: int = field(default=0, init=False)

    def run(self, open_pieces: Callable[[], Pieces], finish: Callable[[], None] | None = None) -> bool:
        """Write the missing files, call ``finish``, write the manifest. Returns False if the copy was complete."""
        try:
            self._make_folder()
            with self._locked():
                self._claim()
                records = {} if self.force else self._kept()
                todo = [file for file in self.wanted if file.name not in records]
                if not todo and is_packed(self.folder) and not self.force:
                    return False
                self._require_space(todo)
                self._begin(records)
                self.done = sum(file.nbytes for file in self.wanted if file.name in records)
                pieces = open_pieces() if todo else {}
                gc.collect()  # frees the second model, whose modules may be in cycles
                for file in todo:
                    records[file.name] = self._write_file(file, pieces)
                    self._write_manifest(records)
                self._require_unchanged()
                if finish is not None:
                    finish()
                fd = os.open(self.folder, os.O_RDONLY)
                try:
                    os.fsync(fd)  # the finished files' names must reach the disk before the manifest's
                finally:
                    os.close(fd)
                (self.folder / PARTIAL_MANIFEST).rename(self.folder / MANIFEST)
        except OSError as error:
            raise _cannot_write(self.folder, error) from error
        return True

    def discard(self) -> None:
        """Remove the packed files, but leave a partial manifest, which marks the folder as Outcore's."""
        (self.folder / MANIFEST).unlink(missing_ok=True)
        self._begin({})

    @property
    def _in_cache(self) -> bool:
        return self.folder.parent == cache_dir()

    def _make_folder(self) -> None:
        if self.folder.is_symlink() or self.folder.exists():
            # Do not put a lock into a folder that is not ours. Every pack makes the lock before anything else.
            if not (self.folder / _LOCK).exists():
                self._claim()
            return
        if self._in_cache:
            make_cache()
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        self.folder.mkdir(mode=0o700 if self._in_cache else 0o777, exist_ok=True)

    def _claim(self) -> None:
        """Raise ``StoreError`` if the folder cannot be used, such as one for a full copy that has other files."""
        ours = self._in_cache or self.manifest.kind != FULL
        if self._in_cache:
            require_own(self.folder)
        elif ours and self.folder.is_symlink():
            raise StoreError(f"{self.folder}: a link, which Outcore never makes; delete it and pack again")
        if not self.folder.is_dir():
            raise StoreError(f"{self.folder}: a file; give a new or empty folder for the packed copy")
        begun = ours or is_packed(self.folder) or is_packed(self.folder, PARTIAL_MANIFEST)
        if not begun and {p.name for p in self.folder.iterdir()} - _BEGUN:
            raise StoreError(f"{self.folder}: holds other files; give a new or empty folder for the packed copy")

    @contextmanager
    def _locked(self) -> Iterator[None]:
        # filelock's own ``FileLock`` would make missing folders, and on a file system without locks take the file's
        # existence for the lock, which would stay locked after a kill.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(self.folder / _LOCK, flags, 0o666)
        try:
            if not lock_descriptor(fd, blocking=False):
                self._tell("waiting for another process")
                lock_descriptor(fd)
            yield
        finally:
            os.close(fd)

    def _kept(self) -> dict[str, Record]:
        """Return the records of whole files that an earlier pack left: one cut off, or an overlay for other layers."""
        records: dict[str, Record] = {}
        for name in (MANIFEST, PARTIAL_MANIFEST):
            try:
                found, mine = read_manifest(self.folder / name), self.manifest
            except StoreError:
                continue
            if found.kind == mine.kind and found.source.same(mine.source):
                there, wanted = (
                    {coded.name(path): coded for path, coded in each.codings.items()} for each in (found, mine)
                )
                # Compare codings: planes with another number of high bits may have the same names and shapes.
                alike = [f for f in self.files if all(there.get(t) == wanted.get(t) for t, _, _ in f.tensors)]
                records |= whole_files(self.folder, name, alike, mine.source)
            elif name == MANIFEST and mine.kind == FULL and not self._in_cache:
                raise StoreError(f"{self.folder}: {OTHER}")
        return records

    def _require_space(self, todo: Sequence[PackedFile]) -> None:
        needed = sum(file.nbytes for file in todo) + self.extra
        needed += needed // 100 + (1 << 20)  # for the file system and the manifest
        free = shutil.disk_usage(self.folder).free
        if self.force:  # existing files are removed first
            free += sum(path.stat().st_size for path in self.folder.iterdir() if FILE_NAME.fullmatch(path.name))
        if needed > free:
            raise StoreSpaceError(
                f"{self.folder}: a packed copy needs {format_size(needed)} more, but only {format_size(free)} are free;"
                f" {_FREE}"
            )

    def _require_unchanged(self) -> None:
        folder = self.checkpoint.folder
        if not is_packed(folder) and identity_of(open_checkpoint(folder)) != identity_of(self.checkpoint):
            self.discard()
            raise StoreError(f"{folder}: the model changed while it was packed; pack again once its files are complete")

    def _begin(self, records: dict[str, Record]) -> None:
        """Write a partial manifest, which marks the folder as Outcore's; then remove files that it does not list."""
        if self.force and (self.folder / MANIFEST).exists():
            (self.folder / MANIFEST).rename(self.folder / PARTIAL_MANIFEST)
        self._write_manifest(records)
        for path in self.folder.iterdir():
            ours = FILE_NAME.fullmatch(path.name) and path.name not in records
            if ours or path.name.endswith(_TEMPORARY):
                path.unlink()

    def _write_file(self, file: PackedFile, pieces: Pieces) -> Record:
        path, what, calls = self.folder / file.name, f"packing {file.unit}", disk_calls.system()
        temporary = path.with_name(path.name + _TEMPORARY)
        digest = xxhash.xxh3_128()
        self._tell(what)
        try:
            with temporary.open("wb", buffering=0) as out:
                calls.around_cache(out.fileno())  # a large copy would evict everything else from the page cache
                for data in file_content(file, pieces):
                    digest.update(data)
                    self.done += len(data)
                    while data:
                        data = data[(count := calls.write(out.fileno(), data)) :]
                        wrote("packed copies", count)
                    self._tell(what)
                os.fsync(out.fileno())
            status = temporary.stat()
            temporary.rename(path)
        except BaseException as error:
            temporary.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise _cannot_write(path, error) from error
            raise
        clear_cache()
        return Record(nbytes=status.st_size, mtime_ns=status.st_mtime_ns, checksum=digest.hexdigest())

    def _write_manifest(self, records: dict[str, Record]) -> None:
        mine = self.manifest.model_copy(update={"files": dict(sorted(records.items()))})
        # The oldest schema that can describe this copy.
        schema = PLAIN_SCHEMA if mine.coding == PLAIN else SCHEMA
        document = {"format": FORMAT, "schema": schema, **mine.model_dump(by_alias=True, exclude_defaults=True)}
        write_small(self.folder / PARTIAL_MANIFEST, json.dumps(document, indent=1).encode())

    def _tell(self, what: str) -> None:
        if self.progress is not None:
            self.progress(what, self.done, sum(file.nbytes for file in self.wanted))


def write_small(path: Path, data: bytes) -> None:
    """Write a file atomically."""
    temporary = path.with_name(path.name + _TEMPORARY)
    try:
        with temporary.open("wb") as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _cannot_write(path: Path, error: OSError) -> StoreError:
    if error.errno in _FULL_DISK:
        free = shutil.disk_usage(path.parent).free
        return StoreSpaceError(f"{path}: the disk is full ({error.strerror}, {format_size(free)} free); {_FREE}")
    return StoreError(f"{path}: cannot be written ({error.strerror}); choose a folder that can be")
