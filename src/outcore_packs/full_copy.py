"""Packs a whole model into a folder that can be opened as a model; a folder in the cache is found by itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import xxhash

from outcore.checkpoint.checkpoint import CONFIG, Checkpoint, TensorInfo, config_files, open_checkpoint
from outcore.checkpoint.lazy_model import DTYPES, LazyModel, open_lazily
from outcore.checkpoint.manifest import FULL, MANIFEST, PLAIN, PLANES, Manifest, is_packed
from outcore.checkpoint.pack import OTHER, PackWriter, Progress, plain_pieces, write_small
from outcore.checkpoint.packed_bytes import PackedFile, Plain, Spec, packed_file, piece_bytes
from outcore.checkpoint.packed_store import (
    NON_LAYER,
    PackedStore,
    full_copy,
    open_again,
    open_full,
    open_packed,
    source_of,
)
from outcore.errors import StoreError
from outcore.machine.cache_folder import kept, remove_empty
from outcore.modules.layers import find_layers, named_parameters

from .codings import Coding, as_used, choose, with_codings


def pack_model(
    folder: Path,
    output: Path | None,
    *,
    force: bool = False,
    coding: str = PLAIN,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> PackedStore:
    """Packs a whole model into a folder, which ``open_model`` opens as a model, or finds if it is in the cache.

    Args:
        output: an empty or new folder, or one written by ``pack_model``; None: a folder in the cache.
        force: rewrite an existing copy.
        coding: ``compact``: store layers' tensors in fewer bytes if possible, and decode them in each pass.
            ``planes:BITS``: store the BITS high bits of quantized codes apart, to draft with (``stored_planes``).

    Raises:
        StoreSpaceError: the disk is too full; finished files are kept.
        StoreError: the output folder has other files or another model's copy, or the model cannot be packed.
        CheckpointError: the folder is not a whole model, or mlx-lm cannot build it.
    """
    if is_packed(folder):
        raise StoreError(f"{folder}: is a packed copy already; give the folder of the original model")
    checkpoint = open_checkpoint(folder)
    if output is not None:
        return _packed(checkpoint, output, force, coding, trust_remote_code, progress)
    output = full_copy(checkpoint, coding)
    try:
        with kept(output):
            return _packed(checkpoint, output, force, coding, trust_remote_code, progress)
    except BaseException:
        remove_empty(output)
        raise


def _packed(
    checkpoint: Checkpoint, output: Path, force: bool, coding: str, trust_remote_code: bool, progress: Progress | None
) -> PackedStore:
    folder = checkpoint.folder
    if not force and (whole := _whole_copy(output, checkpoint, coding)) is not None:
        return whole
    lazy = open_lazily(checkpoint, trust_remote_code=trust_remote_code)
    if lazy.config.get("model_file") is not None:
        raise StoreError(f"{folder}: has its own code (model_file) and cannot be packed; use it unpacked")
    written = (CONFIG, ".index.json", MANIFEST)
    copied = [path for path in config_files(folder) if path.is_file() and not path.name.endswith(written)]
    codings = {} if coding == PLAIN else _codings(lazy, coding, progress)
    files = _full_files(lazy, codings)
    coded = {path: found.coded for path, found in codings.items()}
    manifest = Manifest(kind=FULL, source=source_of(checkpoint), files={}, coding=coding, codings=coded)
    extra = sum(path.stat().st_size for path in copied)
    pack = PackWriter(output, checkpoint, manifest, files, files, progress, force, extra)

    def finish() -> None:
        for path in copied:
            write_small(output / path.name, path.read_bytes())
        write_small(output / CONFIG, json.dumps(lazy.config, indent=4).encode())
        try:
            _check_round_trip(pack, trust_remote_code)
        except StoreError:
            pack.discard()
            raise

    pack.run(lambda: with_codings(plain_pieces(open_again(lazy)), codings), finish)
    return _whole_copy(output, checkpoint, coding) or open_packed(output)


def _codings(lazy: LazyModel, coding: str, progress: Progress | None) -> dict[str, Coding]:
    again = open_again(lazy)
    found = choose(find_layers(again.model), coding, plain_pieces(again), progress)
    if coding.startswith(PLANES) and not found:
        why = f"which takes affine codes of more than {coding.removeprefix(f'{PLANES}:')} bits"
        if not lazy.config.get("quantization"):
            why = "since the model is not quantized"
        what = f"no layer can be packed with --coding {coding}, {why}"
        raise StoreError(f"{lazy.checkpoint.folder}: {what}; choose another coding")
    return found


def _whole_copy(output: Path, checkpoint: Checkpoint, coding: str) -> PackedStore | None:
    if not is_packed(output):
        return None
    store = open_packed(output)
    found = store.manifest
    if found.kind != FULL or not found.source.same(source_of(checkpoint)):
        raise StoreError(f"{output}: {OTHER}")
    if found.coding != coding:
        raise StoreError(f"{output}: packed with --coding {found.coding}; give another folder, or --force")
    return store


def _full_files(lazy: LazyModel, codings: Mapping[str, Coding]) -> list[PackedFile]:
    """Lays out one file for each layer's matrices, and one for all other weights."""
    rest: dict[str, Spec] = {path: (path, a.dtype, tuple(a.shape)) for path, a in named_parameters(lazy.model)}
    files = []
    for i, layer in enumerate(find_layers(lazy.model)):
        specs: list[Spec] = []
        for path in [f"{layer.path}.{p.path}" for p in layer.parameters]:
            plain = rest.pop(path)
            specs.append(codings[path].spec if path in codings else plain)
        files.append(packed_file(f"layer_{i:04}.safetensors", layer.path, specs))
    # Side tables stay in memory. In a layer's file each pass would read them with the matrices.
    side_table = packed_file("", "", {name: a for coding in codings.values() for name, a in coding.side_table.items()})
    return [*files, packed_file(f"{NON_LAYER}.safetensors", NON_LAYER, [*rest.values(), *side_table.tensors])]


def _check_round_trip(pack: PackWriter, trust_remote_code: bool) -> None:
    """Raises StoreError if mlx-lm changes the copy's weights again, or if this device decodes them to other bits."""
    output, codings = pack.folder, pack.manifest.codings
    tensors = {info.name: info for file in pack.files for info in file.places(output)}
    files = tuple(sorted(output / file.name for file in pack.files))
    store = PackedStore(output, pack.manifest, files, *as_used(output, tensors, codings))
    again = open_full(store, trust_remote_code=trust_remote_code)
    pieces = plain_pieces(again)
    arrays = {path: a for path, a in named_parameters(again.model) if path in codings}
    del again
    for path in list(pieces):
        piece, info = pieces.pop(path), store.tensors[path]
        if path in codings and isinstance(piece, TensorInfo):
            if _digest(path, arrays.pop(path)) != codings[path].checksum:
                raise StoreError(f"{output}: {path!a} decodes to other bits on this device; pack without --coding")
            continue
        if isinstance(piece, TensorInfo):
            same = piece == info
        else:
            alike = DTYPES[info.dtype] == piece.dtype and tuple(piece.shape) == info.shape
            same = alike and _digest(path, piece) == _digest(path, info)
        if not same:
            what = "use the original model unpacked"
            raise StoreError(f"{output}: mlx-lm changes {path!a} when it loads it again; {what}")


def _digest(path: str, piece: Plain) -> str:
    digest = xxhash.xxh3_128()
    for data in piece_bytes(path, piece):
        digest.update(data)
    return digest.hexdigest()
