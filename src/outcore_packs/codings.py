"""Encodes matrices of a packed copy in other forms (codings), and finds their decoders. Every coding is lossless.

``compact`` reads all values of a matrix and is used if it takes fewer disk blocks; planes depend on shape and type
only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import xxhash

from outcore.checkpoint.checkpoint import TensorInfo
from outcore.checkpoint.lazy_model import Decoder
from outcore.checkpoint.manifest import AGAIN, COMPACT, PLANES, SPLIT, Coded
from outcore.checkpoint.pack import Progress
from outcore.checkpoint.packed_bytes import Encoding, Pieces, Plain, Spec, piece_bytes
from outcore.errors import StoreError
from outcore.modules.layers import Layer
from outcore.sizes import BLOCK, round_up

from .split_exponents import SplitDecoder, could_be_split, side_table_of
from .stored_planes import Planes, could_be_cut, cut_modules

Form = SplitDecoder | Planes

# By name in manifests: makes the form from the stored bytes' shape, the manifest's entry and the side table, or raises
# ``ValueError`` if no matrix is stored so.
FORMS: dict[str, Callable[[tuple[int, ...], Coded, Any], Form]] = {SPLIT: SplitDecoder.found, PLANES: Planes.found}


@dataclass(frozen=True)
class Coding:
    """The coding of one tensor: its manifest entry and the form that encodes and decodes it."""

    path: str
    coded: Coded
    form: Form

    @property
    def spec(self) -> Spec:
        """The tensor that is stored in its place and read in each pass."""
        return self.coded.name(self.path), mx.uint8, self.form.stored_shape

    @property
    def side_table(self) -> dict[str, mx.array]:
        stored = self.form.stored
        return {} if stored is None else {self.coded.side_table(self.path): stored}

    def encoded(self, plain: Plain) -> Iterator[memoryview]:
        return self.form.encoded(_elements(self.path, plain, self.form.shape, self.form.words))


def choose(
    layers: Sequence[Layer], coding: str, pieces: dict[str, Plain], progress: Progress | None
) -> dict[str, Coding]:
    """Choose the codings of these layers' tensors, by path. Reads the tensors one after the other.

    Args:
        coding: of the copy: ``compact``, or ``planes:BITS`` for the layers that can draft with so many high bits.
        pieces: sources of the tensors; consumed.
    """
    found = {}
    for n, layer in enumerate(layers):
        if progress is not None:
            progress(f"looking at {layer.path}", n, len(layers))
        high = 0 if coding == COMPACT else int(coding.removeprefix(f"{PLANES}:"))
        bits = {f"{at}.weight": module.bits for at, module in cut_modules(layer, high)} if high else {}
        for p in layer.parameters:
            path, shape = f"{layer.path}.{p.path}", tuple(p.array.shape)
            plain = pieces.pop(path)
            if could_be_cut(shape, bits.get(p.path, 0), high):
                words, form = _elements(path, plain, shape, Planes.words), Planes(shape, bits[p.path], high)
                coded = Coded(coding=PLANES, checksum=xxhash.xxh3_128_hexdigest(words.data), bits=form.bits, high=high)
                found[path] = Coding(path, coded, form)
            elif coding == COMPACT and could_be_split(shape) and p.array.dtype == mx.bfloat16 and p.key == "weight":
                words = _elements(path, plain, shape, SplitDecoder.words)
                if (split := _fewer_blocks(words)) is not None:
                    found[path] = Coding(
                        path, Coded(coding=SPLIT, checksum=xxhash.xxh3_128_hexdigest(words.data)), split
                    )
    return found


def _fewer_blocks(words: Any) -> SplitDecoder | None:
    """Return a matrix's split form if it takes fewer disk blocks, else None."""
    side_table = side_table_of(words)
    if side_table is None:
        return None
    form = SplitDecoder.of(words.shape, side_table)
    less = round_up(prod(form.stored_shape), BLOCK) + side_table.nbytes < round_up(words.nbytes, BLOCK)
    return form if less else None


def with_codings(pieces: Mapping[str, Plain], codings: Mapping[str, Coding]) -> Pieces:
    """Return the sources of what is written; ``pieces``: those of the tensors as they are used."""
    made: Pieces = dict(pieces)
    for path, coding in codings.items():
        made[coding.coded.name(path)] = Encoding(coding.form.stored_shape, partial(coding.encoded, pieces[path]))
        del made[path]
        made.update(coding.side_table)
    return made


def _elements(path: str, plain: Plain, shape: Sequence[int], dtype: str) -> Any:
    parts = [np.frombuffer(data, np.uint8).copy() for data in piece_bytes(path, plain)]
    if sum(part.size for part in parts) < prod(shape) * np.dtype(dtype).itemsize:
        raise StoreError(f"{path!a} is different now; the model changed while it was packed")
    return np.concatenate(parts).view(dtype).reshape(tuple(shape))


def as_used(
    folder: Path, tensors: Mapping[str, TensorInfo], codings: Mapping[str, Coded]
) -> tuple[dict[str, TensorInfo], dict[str, Decoder]]:
    """As in ``Codings``. Checks everything, and reads the decoders' side tables."""
    used, decoders = dict(tensors), dict[str, Decoder]()
    for path, coded in codings.items():
        stored = used.pop(coded.name(path), None)
        if stored is None or path in used or stored.dtype != "U8" or not path.endswith(".weight"):
            raise StoreError(f"{folder}: {path[:120]!a} is not stored as the manifest says; {AGAIN}")
        try:
            form = FORMS[coded.coding](stored.shape, coded, _read_side_table(used.pop(coded.side_table(path), None)))
            if form.stored_shape != stored.shape:
                raise ValueError("of another form")
        except (KeyError, ValueError) as error:
            raise StoreError(f"{stored.file}: {path[:120]!a} cannot be decoded; {AGAIN}") from error
        decoders[path] = form
        used[path] = replace(stored, name=path, dtype=form.dtype, shape=form.shape, stored=(stored.dtype, stored.shape))
    return used, decoders


def _read_side_table(info: TensorInfo | None) -> Any:
    if info is None or info.dtype != "U32" or len(info.shape) != 1:
        return None
    try:
        return np.fromfile(info.file, "<u4", info.shape[0], offset=info.offset)
    except OSError as error:
        raise StoreError(f"{info.file}: cannot be read ({error.strerror}); {AGAIN}") from error
