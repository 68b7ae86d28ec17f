"""Chooses where a model's weights are read from: its own files, a packed copy, or both.

A packed copy is a folder of safetensors files, one per layer, in which every tensor begins at a disk block, with a
manifest that is written last. A *full* copy is a model folder of its own. An *overlay* lies in the cache and holds only
the parameters that ``sanitize`` changed, which exist nowhere else. This module reads and plans copies; ``pack`` writes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, cast

import mlx.core as mx
import mlx_lm
import xxhash

from ..errors import CheckpointError, StoreError, UnsupportedModelError
from ..machine.cache_folder import cache_dir, keep, kept, require_own
from ..machine.hardware import version
from ..modules.layers import Layer, find_layers
from ..packages import modules
from .checkpoint import Checkpoint, TensorInfo, open_checkpoint, read_header
from .identity import identity_of
from .lazy_model import Decoder, LazyModel, open_lazily
from .manifest import (
    AGAIN,
    COMPACT,
    FULL,
    MANIFEST,
    OVERLAY,
    PLAIN,
    Coded,
    Manifest,
    PackedFrom,
    Record,
    is_packed,
    read_manifest,
)
from .packed_bytes import CHUNK, PAD, PackedFile, packed_file


class Codings(Protocol):
    def as_used(
        self, folder: Path, tensors: Mapping[str, TensorInfo], codings: Mapping[str, Coded]
    ) -> tuple[dict[str, TensorInfo], dict[str, Decoder]]:
        """Return a copy's tensors with the dtype and shape that the model uses, and decoders of the encoded ones.

        Raises:
            StoreError: a tensor that ``codings`` names is missing, or its form does not fit the coding.
        """


def codings() -> Codings | None:
    return cast(Codings | None, modules("codings").get("packs"))


def as_used(
    folder: Path, tensors: dict[str, TensorInfo], manifest: Manifest
) -> tuple[dict[str, TensorInfo], dict[str, Decoder]]:
    """Like ``Codings.as_used``; also raises ``StoreError`` if the package is missing."""
    if not manifest.codings:
        return tensors, {}
    if (known := codings()) is None:
        what = "needs the package outcore_packs, which is missing"
        raise StoreError(f"{folder}: packed with --coding {manifest.coding}, which {what}; install outcore again")
    return known.as_used(folder, tensors, manifest.codings)


NON_LAYER = "non_layer"


@dataclass(frozen=True)
class PackedStore:
    """A packed copy whose files match its manifest.

    Attributes:
        files: the weight files, sorted by name.
        tensors: parameter path → its place; padding is left out.
        decoders: by parameter path, for tensors that are stored encoded.
    """

    folder: Path
    manifest: Manifest
    files: tuple[Path, ...]
    tensors: dict[str, TensorInfo]
    decoders: Mapping[str, Decoder]


def open_packed(folder: Path) -> PackedStore:
    """Open a packed copy and check that its files are those that were packed.

    A file with the recorded size and modification time is accepted. If only the time differs, as in a copied folder,
    the file is read once to compute its checksum.

    Raises:
        StoreError: the manifest is garbled, or a file is missing, changed or damaged.
    """
    manifest = read_manifest(folder / MANIFEST)
    tensors: dict[str, TensorInfo] = {}
    for name, record in manifest.files.items():
        for tensor, info in check_file(folder / name, record).items():
            if tensor in tensors:
                raise StoreError(f"{folder / name}: {tensor[:120]!a} is also in {tensors[tensor].file.name}; {AGAIN}")
            tensors[tensor] = info
    files = tuple(folder / name for name in sorted(manifest.files))
    return PackedStore(folder, manifest, files, *as_used(folder, tensors, manifest))


def check_file(path: Path, record: Record) -> dict[str, TensorInfo]:
    """Return a packed file's tensors without padding; raise ``StoreError`` if the file differs from ``record``."""
    try:
        status = path.stat()
        same = status.st_size == record.nbytes
        if same and status.st_mtime_ns != record.mtime_ns:
            same = _checksum(path) == record.checksum
        if not same:
            raise StoreError(f"{path}: changed since it was packed; {AGAIN}")
        return {name: info for name, info in read_header(path).items() if not name.startswith(PAD)}
    except OSError as error:
        raise StoreError(f"{path}: cannot be read ({error.strerror}); {AGAIN}") from error
    except CheckpointError as error:
        raise StoreError(f"{error} (a packed file: {AGAIN})") from error


def _checksum(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while data := file.read(CHUNK):
            digest.update(data)
    return digest.hexdigest()


def open_model(folder: Path, compact: bool = False, **arguments: Any) -> LazyModel:
    """Open the folder's model lazily: from a full packed copy in the cache if there is one, otherwise from the folder.

    A damaged copy in the cache is skipped with a warning, since the original is there.

    Args:
        compact: prefer a copy with the coding ``compact``.
        arguments: those of ``open_lazily``.

    Raises:
        StoreError: the folder is a packed copy that is damaged, or not a whole model.
        CheckpointError: the folder is not a whole model, or mlx-lm cannot build it.
    """
    if is_packed(folder):
        return _open_kept(folder, arguments)
    checkpoint = open_checkpoint(folder)
    copy = _copy_of(checkpoint, COMPACT, arguments) if compact else None
    return copy or _copy_of(checkpoint, PLAIN, arguments) or open_lazily(checkpoint, **arguments)


def open_copy(folder: Path, coding: str, **arguments: Any) -> LazyModel | None:
    """Open a model lazily from its copy with this coding in the cache; None if there is none."""
    return None if is_packed(folder) else _copy_of(open_checkpoint(folder), coding, arguments)


def _copy_of(checkpoint: Checkpoint, coding: str, arguments: Mapping[str, Any]) -> LazyModel | None:
    copy = full_copy(checkpoint, coding, arguments.get("model_config"))
    if not is_packed(copy):
        return None
    try:
        return _open_kept(copy, arguments, identity_of(checkpoint))
    except StoreError as error:
        logging.getLogger("outcore").warning("%s; until then the original model is used", error)
        return None


def _open_kept(folder: Path, arguments: Mapping[str, Any], identity: str | None = None) -> LazyModel:
    """Open a full copy, and mark it as in use while its model lives. ``identity``: its original's; None: any."""
    with kept(folder, make=False):
        store = open_packed(folder)
        if identity not in (None, store.manifest.source.identity):
            raise StoreError(f"{folder}: packed from another model; {AGAIN}")
        lazy = open_full(store, **arguments)
        keep(folder, lazy.model)
        return lazy


def open_full(store: PackedStore, **arguments: Any) -> LazyModel:
    """Open a model lazily from a full packed copy. ``store.manifest`` need not be on disk yet."""
    manifest, folder = store.manifest, store.folder
    if manifest.kind != FULL:
        raise StoreError(f"{folder}: holds only some tensors of {manifest.source.folder!a}; give that folder")
    weights: dict[str, mx.array] = {}
    for file in store.files:
        found: Any = mx.load(str(file))
        weights.update((name, array) for name, array in found.items() if not name.startswith(PAD))
    for path, coded in manifest.codings.items():
        weights.pop(coded.side_table(path), None)
        weights[path] = store.decoders[path].decode(weights.pop(coded.name(path)))
    checkpoint = Checkpoint(folder, store.files, store.tensors, notes={"identity": manifest.source.identity})
    try:
        lazy = open_lazily(checkpoint, **arguments, weights=weights)
    except UnsupportedModelError:
        raise
    except CheckpointError as error:
        raise StoreError(f"{error}; {AGAIN}") from error
    coding = manifest.coding if store.decoders else PLAIN
    return replace(
        lazy, decoders=store.decoders, coding=coding, again=lambda: open_full(open_packed(folder), **arguments)
    )


def open_again(lazy: LazyModel) -> LazyModel:
    """Open the model once more, so that evaluating the new arrays leaves those of ``lazy`` unread."""
    plain = lazy.again()
    return plain if lazy.reshape is None else lazy.reshape(plain)


def cached(kind: str, checkpoint: Checkpoint, *more: Any) -> Path:
    """Return the cache folder for a copy of this model made by this MLX and mlx-lm. ``more``: the rest of its key."""
    folder = checkpoint.folder.absolute()
    if folder.parent.name == "snapshots":  # the Hub's cache: models--owner--name/snapshots/<commit>
        folder = folder.parent.parent
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", folder.name.removeprefix("models--"))[:80].strip(".-") or "model"
    made_by = [version("mlx"), mlx_lm.__version__]
    key = hashlib.sha256(json.dumps([*made_by, *more], sort_keys=True, default=str).encode()).hexdigest()
    path = cache_dir() / f"{kind}-{name}-{identity_of(checkpoint)[:16]}-{key[:8]}"
    require_own(path)
    return path


def full_copy(checkpoint: Checkpoint, coding: str, model_config: dict[str, Any] | None = None) -> Path:
    return cached(FULL, checkpoint, model_config or {}, *([] if coding == PLAIN else [coding]))


def source_of(checkpoint: Checkpoint) -> PackedFrom:
    folder = checkpoint.folder.absolute().name[:1000]
    return PackedFrom(folder=folder, identity=identity_of(checkpoint), mlx_lm=mlx_lm.__version__, mlx=version("mlx"))


Overlay = tuple[Path, list[PackedFile]]


def overlay(lazy: LazyModel) -> Overlay:
    """Return the overlay's folder and files: one file for each layer with parameters that ``sanitize`` changed."""
    files = []
    for i, layer in enumerate(find_layers(lazy.model)):
        paths = {f"{layer.path}.{p.path}": p.array for p in layer.parameters}
        changed = {path: a for path, a in paths.items() if path in lazy.loaded and path not in lazy.origins}
        if changed:
            files.append(packed_file(f"layer_{i:04}.safetensors", layer.path, changed))
    # The key tells apart models with and without an adapter (longer paths), and full copies from originals.
    names = [file.name for file in lazy.checkpoint.files]
    key = (lazy.arguments.get("model_config") or {}, names, [file.tensors for file in files])
    return cached(OVERLAY, lazy.checkpoint, *key), files


def places(lazy: LazyModel, layers: Sequence[Layer], planned: Overlay | None = None) -> dict[str, TensorInfo]:
    """Return where each parameter of these layers is on disk, or will be once ``pack_overlay`` has run, by full path.

    Omits parameters that do not come from the checkpoint (an adapter's). ``planned``: ``overlay(lazy)``; without it,
    call this before the model's lazy arrays are replaced or cast.
    """
    folder, files = planned or overlay(lazy)
    found = {info.name: info for file in files for info in file.places(folder)}
    found.update(lazy.origins)
    paths = [f"{layer.path}.{p.path}" for layer in layers for p in layer.parameters]
    return {path: found[path] for path in paths if path in found}


def missing_bytes(lazy: LazyModel, layers: Sequence[Layer]) -> int:
    """Return the bytes that ``pack_overlay`` would write for these layers."""
    folder, files = overlay(lazy)
    wanted = {layer.path for layer in layers}
    files = [file for file in files if file.unit in wanted]
    whole = whole_files(folder, MANIFEST, files, source_of(lazy.checkpoint)) if files else {}
    return sum(file.nbytes for file in files if file.name not in whole)


def whole_files(folder: Path, manifest: str, files: Sequence[PackedFile], source: PackedFrom) -> dict[str, Record]:
    """Return the manifest's records of those ``files`` that are whole; none if the copy is not of ``source``."""
    try:
        found = read_manifest(folder / manifest)
    except StoreError:
        return {}
    records = found.files if found.source.same(source) else {}
    whole = {}
    for file in files:
        with contextlib.suppress(StoreError, KeyError):
            record = records[file.name]
            if check_file(folder / file.name, record) == {info.name: info for info in file.places(folder)}:
                whole[file.name] = record
    return whole
