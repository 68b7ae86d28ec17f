"""What packed copies hold, in bounded memory; a pack that was cut off goes on where it stopped.

What lies unchanged in the original is copied byte by byte; what ``sanitize`` changed is computed by MLX, one parameter
at a time, in the thread that calls. A file gets its name only when all its bytes are on the disk.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from ..errors import StoreError
from ..machine.cache_use import keep, kept, remove_empty
from ..modules.layers import Layer, find_layers
from ..modules.module_tree import named_parameters
from .checkpoint import Checkpoint, TensorInfo, open_checkpoint
from .codings import Coding, as_used, choose, digest_of, with_codings
from .config import CONFIG, files_beside
from .lazy_model import LazyModel, open_lazily
from .manifest import DRAFT, FULL, MANIFEST, OVERLAY, PLAIN, PLANES, Manifest, is_packed
from .pack_writer import OTHER, PackWriter, Progress, write_small
from .packed_bytes import PackedFile, Pieces, Plain, Spec, packed_file, same_bytes
from .packed_store import (
    NON_LAYER,
    Overlay,
    PackedStore,
    full_copy,
    open_again,
    open_full,
    open_packed,
    overlay,
    source_of,
    whole_files,
)

__all__ = ["Progress", "pack_model", "pack_overlay"]


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
    if wanted:
        keep(folder, lazy.model)
        _write(OVERLAY, folder, lazy.checkpoint, files, wanted, lambda: dict(_pieces(open_again(lazy))), progress)


def pack_draft(
    folder: Path,
    checkpoint: Checkpoint,
    files: Sequence[PackedFile],
    open_pieces: Callable[[], Pieces],
    progress: Progress | None = None,
) -> None:
    """Write a drafting copy of a model, unless it is there and whole. Raises as ``pack_overlay``."""
    _write(DRAFT, folder, checkpoint, files, files, open_pieces, progress)


def _write(
    kind: Literal["overlay", "draft"],
    folder: Path,
    checkpoint: Checkpoint,
    files: Sequence[PackedFile],
    wanted: Sequence[PackedFile],
    open_pieces: Callable[[], Pieces],
    progress: Progress | None,
) -> None:
    source = source_of(checkpoint)
    if len(whole_files(folder, MANIFEST, wanted, source)) < len(wanted):
        manifest = Manifest(kind=kind, source=source, files={})
        PackWriter(folder, checkpoint, manifest, files, wanted, progress).run(open_pieces)


def pack_model(
    folder: Path,
    output: Path | None,
    *,
    force: bool = False,
    coding: str = PLAIN,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> PackedStore:
    """Pack a whole model into a folder of its own, which ``open_model`` opens by itself or finds in the cache.

    Args:
        output: an empty or new folder, or one that ``pack_model`` wrote; None: a folder in the cache.
        force: write again what is there already.
        coding: ``compact``: layers' tensors take fewer bytes where they can, which costs decoding them in each sweep.
            ``planes:BITS``: so many high bits of quantized codes lie apart, to draft with (``stored_planes``).

    Raises:
        StoreSpaceError: the disk is too full; what is finished is kept.
        StoreError: the output folder holds other things or a copy that no longer fits, or the model cannot be packed.
        CheckpointError: the folder is not a whole model, or mlx-lm cannot make it.
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
    checkpoint: Checkpoint,
    output: Path,
    force: bool,
    coding: str,
    trust_remote_code: bool,
    progress: Progress | None,
) -> PackedStore:
    folder = checkpoint.folder
    if not force and (whole := _whole_copy(output, checkpoint, coding)) is not None:
        return whole
    lazy = open_lazily(checkpoint, trust_remote_code=trust_remote_code)
    if lazy.config.get("model_file") is not None:
        raise StoreError(f"{folder}: has code of its own (model_file) and cannot be packed; it runs from where it is")
    written = (CONFIG, ".index.json", MANIFEST)
    copied = [path for path in files_beside(folder) if path.is_file() and not path.name.endswith(written)]
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

    if pack.run(lambda: with_codings(_pieces(open_again(lazy)), codings), finish):
        return open_packed(output)
    return _whole_copy(output, checkpoint, coding) or open_packed(output)


def _codings(lazy: LazyModel, coding: str, progress: Progress | None) -> dict[str, Coding]:
    """What can be stored in another form, by looking at all of the layers.

    Raises:
        StoreError: no codes can be cut into planes.
    """
    again = open_again(lazy)
    layers = find_layers(again.model)
    done = iter(range(len(layers)))

    def told(path: str) -> None:
        if progress is not None:
            progress(f"looking at {path}", next(done), len(layers))

    found = choose(layers, coding, _pieces(again), told)
    if coding.startswith(PLANES) and not found:
        why = f"which takes affine codes of more than {coding.removeprefix(f'{PLANES}:')} bits"
        if not lazy.config.get("quantization"):
            why = "since the model is not quantized"
        what = f"no layer's codes can be cut as --coding {coding} says, {why}"
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
    """Each layer's parameters of two and more dimensions, then everything else."""
    rest: dict[str, Spec] = {path: (path, a.dtype, tuple(a.shape)) for path, a in named_parameters(lazy.model)}
    files = []
    for i, layer in enumerate(find_layers(lazy.model)):
        specs: list[Spec] = []
        for path in [f"{layer.path}.{p.path}" for p in layer.parameters]:
            plain = rest.pop(path)
            specs += codings[path].specs if path in codings else [plain]
        files.append(packed_file(f"layer_{i:04}.safetensors", layer.path, specs))
    # In a layer's file what stays in memory would lie between what is read for each sweep, and be read too.
    beside = packed_file("", "", {name: a for coding in codings.values() for name, a in coding.beside.items()})
    return [*files, packed_file(f"{NON_LAYER}.safetensors", NON_LAYER, [*rest.values(), *beside.tensors])]


def _pieces(lazy: LazyModel) -> dict[str, Plain]:
    # Of the arrays only those without a place on disk are kept. The others would stay in memory once an array that
    # was made of them has been evaluated.
    return {path: lazy.origins.get(path, array) for path, array in named_parameters(lazy.model)}


def _check_round_trip(pack: PackWriter, trust_remote_code: bool) -> None:
    """Refuse a copy of which mlx-lm would make other weights: one whose ``sanitize`` changes what it made itself; and
    one that this device decodes to other bits.

    Raises:
        StoreError: names the first parameter that would differ.
    """
    output, codings = pack.folder, pack.manifest.codings
    tensors = {info.name: info for file in pack.files for info in file.places(output)}
    files = tuple(sorted(output / file.name for file in pack.files))
    store = PackedStore(output, pack.manifest, files, *as_used(output, tensors, codings))
    again = open_full(store, trust_remote_code=trust_remote_code)
    pieces = _pieces(again)
    arrays = {path: a for path, a in named_parameters(again.model) if path in codings}
    del again
    for path in list(pieces):
        piece, info = pieces.pop(path), store.tensors[path]
        if path in codings and isinstance(piece, TensorInfo):
            if digest_of(path, arrays.pop(path)) != codings[path].checksum:
                raise StoreError(f"{output}: {path!a} is decoded to other bits here; leave out --coding")
            continue
        if piece == info if isinstance(piece, TensorInfo) else same_bytes(piece, info):
            continue
        raise StoreError(f"{output}: mlx-lm changes {path!a} when it loads it again; use the original model unpacked")
