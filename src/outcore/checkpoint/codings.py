"""Which parameters of a model's layers a packed copy stores in another form, the bytes that it stores of them, and what
puts them together.

A coding gives back every bit. What takes fewer bytes is chosen for each tensor by looking at all of its values: fewer
blocks on disk than the tensor itself. What can be cut into planes is seen by its form.
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

from ..errors import StoreError
from ..modules.layers import Layer
from ..modules.split_exponents import SplitDecoder, beside_rows, could_be_split
from ..sizes import BLOCK, round_up
from .checkpoint import TensorInfo
from .lazy_model import Decoder
from .manifest import AGAIN, COMPACT, PLANES, SPLIT, Coded
from .nested import cut_modules
from .packed_bytes import Encoding, Pieces, Plain, Spec, piece_bytes
from .stored_planes import Planes, could_be_cut


@dataclass(frozen=True)
class Coding:
    """How one tensor is stored, by what the manifest says of it and what encodes and decodes it."""

    path: str
    coded: Coded
    form: SplitDecoder | Planes

    @property
    def specs(self) -> list[Spec]:
        """What is stored in the place of the tensor, and is read in each pass."""
        return [(self.coded.name(self.path), mx.uint8, self.form.stored_shape)]

    @property
    def beside(self) -> dict[str, mx.array]:
        """What is stored elsewhere, and stays in memory, by its name; of ``split16`` alone."""
        return {self.coded.beside(self.path): self.form.stored} if isinstance(self.form, SplitDecoder) else {}


def choose(
    layers: Sequence[Layer], coding: str, pieces: dict[str, Plain], told: Callable[[str], None] = lambda _: None
) -> dict[str, Coding]:
    """The codings of these layers' tensors, by their paths. Reads them, one after the other.

    Args:
        coding: of the copy: ``compact``, or ``planes:BITS``, for the layers that can draft with so many high bits.
        pieces: their bytes; what was looked at is taken out.
        told: called with each layer's path.
    """
    found = {}
    for layer in layers:
        told(layer.path)
        high = 0 if coding == COMPACT else int(coding.removeprefix(f"{PLANES}:"))
        bits = {f"{at}.weight": module.bits for at, module in cut_modules(layer, high)} if high else {}
        for p in layer.parameters:
            path, shape = f"{layer.path}.{p.path}", tuple(p.array.shape)
            plain = pieces.pop(path)
            if could_be_cut(shape, bits.get(p.path, 0), high):
                words, form = _elements(path, plain, shape, "<u4"), Planes(shape, bits[p.path], high)
                coded = Coded(coding="planes", checksum=_checksum(words), bits=form.bits, high=high)
                found[path] = Coding(path, coded, form)
            elif coding == COMPACT and could_be_split(shape) and p.array.dtype == mx.bfloat16 and p.key == "weight":
                words = _elements(path, plain, shape, "<u2")
                if (split := _fewer_blocks(words)) is not None:
                    found[path] = Coding(path, Coded(coding=SPLIT, checksum=_checksum(words)), split)
    return found


def _fewer_blocks(words: Any) -> SplitDecoder | None:
    """A matrix's form that takes fewer blocks of a disk; None: it would not."""
    beside = beside_rows(words)
    if beside is None:
        return None
    form = SplitDecoder.of(words.shape, beside)
    less = round_up(prod(form.stored_shape), BLOCK) + beside.nbytes < round_up(words.nbytes, BLOCK)
    return form if less else None


def _checksum(words: Any) -> str:
    return xxhash.xxh3_128_hexdigest(words.data)


def digest_of(path: str, piece: Plain) -> str:
    """The xxh3_128 of a tensor's bytes."""
    digest = xxhash.xxh3_128()
    for data in piece_bytes(path, piece):
        digest.update(data)
    return digest.hexdigest()


def with_codings(pieces: Mapping[str, Plain], codings: Mapping[str, Coding]) -> Pieces:
    """What is written where tensors have codings; ``pieces`` as they are used."""
    made: Pieces = dict(pieces)
    for path, coding in codings.items():
        made[coding.coded.name(path)] = Encoding(coding.form.stored_shape, partial(_encoded, coding, pieces[path]))
        del made[path]
        made.update(coding.beside)
    return made


def _encoded(coding: Coding, plain: Plain) -> Iterator[memoryview]:
    dtype = "<u2" if coding.coded.coding == SPLIT else "<u4"
    return coding.form.encoded(_elements(coding.path, plain, coding.form.shape, dtype))


def _elements(path: str, plain: Plain, shape: Sequence[int], dtype: str) -> Any:
    """All of a tensor's elements, in memory."""
    parts = [np.frombuffer(data, np.uint8).copy() for data in piece_bytes(path, plain)]
    if sum(part.size for part in parts) < prod(shape) * np.dtype(dtype).itemsize:
        raise StoreError(f"{path!a} is not as it was; the model changed while it was packed")
    return np.concatenate(parts).view(dtype).reshape(tuple(shape))


def as_used(
    folder: Path, tensors: Mapping[str, TensorInfo], codings: Mapping[str, Coded]
) -> tuple[dict[str, TensorInfo], dict[str, Decoder]]:
    """A copy's tensors as they are used, and what decodes those that have a coding, both by their names: of the tensors
    that its files have, believing nothing. What decoders hold is read.

    Raises:
        StoreError: a coding's tensor is not there or not of its form.
    """
    used, decoders = dict(tensors), dict[str, Decoder]()
    for path, coded in codings.items():
        stored = used.pop(coded.name(path), None)
        if stored is None or path in used or stored.dtype != "U8" or len(stored.shape) != 2:
            raise StoreError(f"{folder}: {path[:120]!a} is not stored as the manifest says; {AGAIN}")
        rows, columns = stored.shape
        try:
            form: SplitDecoder | Planes
            if coded.coding == SPLIT:
                form, dtype = _split((rows, columns // 3 * 2), used.pop(coded.beside(path))), "BF16"
            else:
                form, dtype = Planes((rows, columns // 4), coded.bits, coded.high), "U32"
                if not (could_be_cut(form.shape, form.bits, form.high) and path.endswith(".weight")):
                    raise ValueError("of another form")
            if form.stored_shape != stored.shape:
                raise ValueError("of another form")
        except (KeyError, ValueError) as error:
            raise StoreError(f"{stored.file}: {path[:120]!a} cannot be decoded; {AGAIN}") from error
        decoders[path] = form
        used[path] = replace(stored, name=path, dtype=dtype, shape=form.shape, stored=(stored.dtype, stored.shape))
    return used, decoders


def _split(shape: tuple[int, ...], beside: TensorInfo) -> SplitDecoder:
    if not could_be_split(shape) or beside.dtype != "U32" or len(beside.shape) != 1:
        raise ValueError("of another form")
    try:
        found = np.fromfile(beside.file, "<u4", beside.shape[0], offset=beside.offset)
    except OSError as error:
        raise StoreError(f"{beside.file}: cannot be read ({error.strerror}); {AGAIN}") from error
    return SplitDecoder.of(shape, found)
