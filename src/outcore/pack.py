"""Writing packed copies: file after file in bounded memory, so that a pack that was cut off goes on where it stopped.

What lies unchanged in the original is copied byte by byte; what ``sanitize`` changed is computed by MLX, one parameter
at a time, in the thread that calls. A file gets its name only when all its bytes are on the disk.
"""

from __future__ import annotations

import errno
import fcntl
import fnmatch
import gc
import importlib.metadata
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
import mlx_lm
import mlx_lm.utils
import xxhash
from mlx.utils import tree_flatten

from .checkpoint import Checkpoint, TensorInfo, open_checkpoint
from .errors import StoreError, StoreSpaceError
from .layers import Layer, find_layers
from .origins import LazyModel, open_lazily
from .packed_bytes import Pieces, file_content, same_bytes
from .sizes import format_size
from .store import (
    DRAFT,
    FILE_NAME,
    FORMAT,
    FULL,
    MANIFEST,
    NON_LAYER,
    OVERLAY,
    PARTIAL_MANIFEST,
    SCHEMA,
    Overlay,
    PackedFile,
    PackedStore,
    Record,
    cached,
    is_being_packed,
    is_packed,
    open_again,
    open_full,
    open_packed,
    overlay,
    packed_file,
    predict,
    read_manifest,
    whole_files,
)

__all__ = ["Progress", "pack_model", "pack_overlay", "predict"]

Progress = Callable[[str, int, int], None]
"""Called with what is being done, bytes done, and bytes in all."""

_TEMPORARY = ".partial"
_LOCK = ".lock"
# What mlx-lm downloads of a model, but for weights; and sentencepiece models under names of their own.
_COPIED = [pattern for pattern in mlx_lm.utils.DEFAULT_ALLOW_PATTERNS if not pattern.endswith("safetensors")]
_COPIED += ["*.model"]
_NOT_COPIED = ["config.json", "*.safetensors.index.json", MANIFEST, PARTIAL_MANIFEST, ".*"]
_FULL_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FREE = "free some, or set OUTCORE_CACHE to a folder on another disk; what is finished is kept"
_OTHER = "packed from another model, or by another version of mlx-lm; give another folder, or --force"


def pack_overlay(
    lazy: LazyModel, layers: Sequence[Layer], planned: Overlay | None = None, progress: Progress | None = None
) -> None:
    """Write to the cache what of these layers exists nowhere on disk, unless it is there and whole.

    What is written comes from a second, lazily opened model. Takes memory for about one layer.

    Args:
        planned: what ``overlay`` said while the model still held its lazy arrays, in the dtypes that they were loaded
            in; None: it still does.

    Raises:
        StoreSpaceError: the disk is too full; what is finished is kept.
        StoreError: the overlay cannot be written, or the model on disk has changed meanwhile.
    """
    folder, files = planned or overlay(lazy)
    paths = {layer.path for layer in layers}
    wanted = [file for file in files if file.unit in paths]
    if wanted and len(whole_files(folder, MANIFEST, wanted)) < len(wanted):
        _Pack(folder, OVERLAY, lazy.checkpoint, files, wanted, progress).run(lambda: _pieces(open_again(lazy)))


def pack_draft(
    folder: Path,
    checkpoint: Checkpoint,
    files: Sequence[PackedFile],
    open_pieces: Callable[[], Pieces],
    progress: Progress | None = None,
) -> None:
    """Write a drafting copy of a model, unless it is there and whole.

    Raises:
        StoreSpaceError: the disk is too full; what is finished is kept.
        StoreError: the copy cannot be written, or the model on disk has changed meanwhile.
    """
    if len(whole_files(folder, MANIFEST, files)) < len(files):
        _Pack(folder, DRAFT, checkpoint, files, files, progress).run(open_pieces)


def pack_model(
    folder: Path,
    output: Path | None,
    *,
    force: bool = False,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> PackedStore:
    """Pack a whole model into a folder of its own, which ``open_model`` opens by itself or finds in the cache.

    Args:
        output: an empty or new folder, or one that ``pack_model`` wrote; None: a folder in the cache.
        force: write again what is there already.

    Raises:
        StoreSpaceError: the disk is too full; what is finished is kept.
        StoreError: the output folder holds other things or a copy that no longer fits, or the model cannot be packed.
        CheckpointError: the folder is not a whole model, or mlx-lm cannot make it.
    """
    if is_packed(folder):
        raise StoreError(f"{folder}: is a packed copy already; give the folder of the original model")
    checkpoint = open_checkpoint(folder)
    output = cached(FULL, checkpoint, {}) if output is None else output
    if not force and (whole := _whole_copy(output, checkpoint)) is not None:
        return whole
    lazy = open_lazily(checkpoint, trust_remote_code=trust_remote_code)
    if lazy.config.get("model_file") is not None:
        raise StoreError(f"{folder}: has code of its own (model_file) and cannot be packed; it runs from where it is")
    copied = _files_beside_weights(folder)

    def finish() -> None:
        for path in copied:
            _write_small(output / path.name, path.read_bytes())
        _write_small(output / "config.json", json.dumps(lazy.config, indent=4).encode())
        try:
            _check_round_trip(output, pack, trust_remote_code)
        except StoreError:
            pack.discard()
            raise

    files = _full_files(lazy)
    pack = _Pack(output, FULL, checkpoint, files, files, progress, force, sum(path.stat().st_size for path in copied))
    if pack.run(lambda: _pieces(open_again(lazy)), finish):
        return open_packed(output)
    return _whole_copy(output, checkpoint) or open_packed(output)


def _whole_copy(output: Path, checkpoint: Checkpoint) -> PackedStore | None:
    if not is_packed(output):
        return None
    store = open_packed(output)
    if store.kind != FULL or not _same_source(store.source, _source(checkpoint)):
        raise StoreError(f"{output}: {_OTHER}")
    return store


def _full_files(lazy: LazyModel) -> list[PackedFile]:
    """Each layer's parameters of two and more dimensions, then everything else."""
    rest = dict(tree_flatten(lazy.model.parameters()))
    files = []
    for i, layer in enumerate(find_layers(lazy.model)):
        arrays = {path: rest.pop(path) for path in [f"{layer.path}.{p.path}" for p in layer.parameters]}
        files.append(packed_file(f"layer_{i:04}.safetensors", layer.path, arrays))
    return [*files, packed_file(f"{NON_LAYER}.safetensors", NON_LAYER, rest)]


def _files_beside_weights(folder: Path) -> list[Path]:
    def matches(name: str, patterns: Sequence[str]) -> bool:
        return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)

    found = [path for path in folder.iterdir() if matches(path.name, _COPIED) and not matches(path.name, _NOT_COPIED)]
    return sorted(path for path in found if path.is_file())


def _pieces(lazy: LazyModel) -> Pieces:
    # Of the arrays only those without a place on disk are kept. The others would stay in memory once an array that
    # was made of them has been evaluated.
    return {path: lazy.origins.get(path, array) for path, array in tree_flatten(lazy.model.parameters())}


def _check_round_trip(output: Path, pack: _Pack, trust_remote_code: bool) -> None:
    """Refuse a copy of which mlx-lm would make other weights: one whose ``sanitize`` changes what it made itself.

    Raises:
        StoreError: names the first parameter that would differ.
    """
    tensors = {info.name: info for file in pack.files for info in predict(output / file.name, file.tensors)}
    files = tuple(sorted(output / file.name for file in pack.files))
    again = open_full(PackedStore(output, FULL, tensors, files, pack.source), trust_remote_code=trust_remote_code)
    pieces = _pieces(again)
    del again
    for path in list(pieces):
        piece, info = pieces.pop(path), tensors[path]
        if piece == info if isinstance(piece, TensorInfo) else same_bytes(piece, info):
            continue
        raise StoreError(f"{output}: mlx-lm changes {path!a} when it loads it again; use the original model unpacked")


@dataclass
class _Pack:
    """One packed copy while it is written: ``files`` is what may be in it, ``wanted`` what must be."""

    folder: Path
    kind: str
    checkpoint: Checkpoint
    files: Sequence[PackedFile]
    wanted: Sequence[PackedFile]
    progress: Progress | None
    force: bool = False
    extra: int = 0
    done: int = field(default=0, init=False)

    @property
    def source(self) -> dict[str, str]:
        return _source(self.checkpoint)

    def run(self, open_pieces: Callable[[], Pieces], finish: Callable[[], None] | None = None) -> bool:
        """Write what is missing; False if another process did so meanwhile. ``finish`` runs before the manifest."""
        try:
            self._claim()
            with self._locked():
                records = {} if self.force else self._kept()
                todo = [file for file in self.wanted if file.name not in records]
                if not todo and is_packed(self.folder) and not self.force:
                    return False
                self._require_space(todo)
                self._clear(records)
                self._write_manifest(PARTIAL_MANIFEST, records)
                self.done = sum(file.nbytes for file in self.wanted if file.name in records)
                pieces = open_pieces() if todo else {}
                gc.collect()  # the second model is gone, but modules may be in cycles
                for file in todo:
                    records[file.name] = self._write_file(file, pieces)
                    self._write_manifest(PARTIAL_MANIFEST, records)
                self._require_unchanged()
                if finish is not None:
                    finish()
                self._write_manifest(MANIFEST, records)
                (self.folder / PARTIAL_MANIFEST).unlink()
        except OSError as error:
            raise _cannot_write(self.folder, error) from error
        return True

    def discard(self) -> None:
        """Remove the files written so far; the folder stays ours."""
        (self.folder / MANIFEST).unlink(missing_ok=True)
        self._write_manifest(PARTIAL_MANIFEST, {})
        self._clear({})

    def _claim(self) -> None:
        if is_packed(self.folder) or is_being_packed(self.folder):
            return
        if self.folder.is_file() or (self.folder.is_dir() and {p.name for p in self.folder.iterdir()} - {_LOCK}):
            raise StoreError(f"{self.folder}: holds other files; give a new or empty folder for the packed copy")
        self.folder.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with (self.folder / _LOCK).open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._tell("waiting for another process")
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _kept(self) -> dict[str, Record]:
        """Files that need not be written: of an earlier pack that was cut off, or of an overlay for other layers."""
        records: dict[str, Record] = {}
        for name in (MANIFEST, PARTIAL_MANIFEST):
            try:
                manifest = read_manifest(self.folder / name)
            except StoreError:
                continue
            if manifest.kind == self.kind and _same_source(manifest.source, self.source):
                records |= whole_files(self.folder, name, self.files)
            elif name == MANIFEST:
                raise StoreError(f"{self.folder}: {_OTHER}")
        return records

    def _require_space(self, todo: Sequence[PackedFile]) -> None:
        needed = sum(file.nbytes for file in todo) + self.extra
        needed += needed // 100 + (1 << 20)  # the file system's own, and the manifest
        free = shutil.disk_usage(self.folder).free
        if self.force:  # what is there will go first
            free += sum(path.stat().st_size for path in self.folder.iterdir() if FILE_NAME.fullmatch(path.name))
        if needed > free:
            raise StoreSpaceError(
                f"{self.folder}: a packed copy needs {format_size(needed)} more, but only {format_size(free)} are free;"
                f" {_FREE}"
            )

    def _require_unchanged(self) -> None:
        folder = self.checkpoint.folder
        if not is_packed(folder) and open_checkpoint(folder).identity() != self.checkpoint.identity():
            self.discard()
            raise StoreError(f"{folder}: changed while it was packed; start again when it is whole")

    def _clear(self, records: dict[str, Record]) -> None:
        """Remove what no manifest will vouch for: before all the manifest, if it is to be written anew."""
        if self.force:
            (self.folder / MANIFEST).unlink(missing_ok=True)
        for path in self.folder.iterdir():
            ours = FILE_NAME.fullmatch(path.name) and path.name not in records
            if ours or path.name.endswith(_TEMPORARY):
                path.unlink()

    def _write_file(self, file: PackedFile, pieces: Pieces) -> Record:
        path = self.folder / file.name
        temporary = self.folder / (file.name + _TEMPORARY)
        digest = xxhash.xxh3_128()
        what = f"packing {file.unit}"
        self._tell(what)
        try:
            with temporary.open("wb", buffering=0) as out:
                for data in file_content(file, pieces):
                    digest.update(data)
                    _write_all(out.fileno(), data)
                    self.done += len(data)
                    self._tell(what)
                os.fsync(out.fileno())
            status = temporary.stat()
            temporary.rename(path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise _cannot_write(path, error) from error
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        mx.clear_cache()
        return Record(status.st_size, status.st_mtime_ns, digest.hexdigest())

    def _write_manifest(self, name: str, records: dict[str, Record]) -> None:
        manifest = {
            "format": FORMAT,
            "schema": SCHEMA,
            "kind": self.kind,
            "outcore": _version(),
            "source": self.source,
            "files": {
                name: {"bytes": r.nbytes, "mtime_ns": r.mtime_ns, "xxh3_128": r.checksum}
                for name, r in sorted(records.items())
            },
            "units": [
                {
                    "path": file.unit,
                    "file": file.name,
                    "tensors": len(file.tensors),
                    "bytes": sum(info.nbytes for info in predict(Path(file.name), file.tensors)),
                }
                for file in self.files
                if file.name in records
            ],
        }
        _write_small(self.folder / name, json.dumps(manifest, indent=1).encode())

    def _tell(self, what: str) -> None:
        if self.progress is not None:
            self.progress(what, self.done, sum(file.nbytes for file in self.wanted))


def _source(checkpoint: Checkpoint) -> dict[str, str]:
    folder = checkpoint.folder.absolute().name
    return {"folder": folder, "identity": checkpoint.identity(), "mlx_lm": mlx_lm.__version__}


def _same_source(a: dict[str, str], b: dict[str, str]) -> bool:
    return (a["identity"], a["mlx_lm"]) == (b["identity"], b["mlx_lm"])  # a folder may be renamed


def _version() -> str:
    try:
        return importlib.metadata.version("outcore")
    except importlib.metadata.PackageNotFoundError:  # run from its source folder
        return "unknown"


def _write_all(out: int, data: memoryview) -> None:
    while data:
        data = data[os.write(out, data) :]


def _write_small(path: Path, data: bytes) -> None:
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
