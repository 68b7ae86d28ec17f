"""Which parameters of a model's layers a packed copy stores in another form, the bytes that it stores of them, and what
puts them together.

A coding gives back every bit. What takes fewer bytes is chosen for each tensor by looking at all of its values: fewer
blocks on disk than the tensor itself. What can be cut into planes is seen by its form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import xxhash
from numpy.typing import NDArray

from ..errors import StoreError
from ..modules import split_exponents
from ..modules.layers import Layer
from ..sizes import BLOCK, round_up
from . import stored_planes
from .checkpoint import TensorInfo
from .lazy_model import Decoder
from .manifest import AGAIN, PLANES, SPLIT, Coded
from .nested import cut_modules
from .packed_bytes import Encoding, Pieces, Plain, Spec, piece_bytes


@dataclass(frozen=True)
class Coding:
    """How one tensor is stored.

    Attributes:
        shape: of the tensor as it is used.
        beside: of ``split16``, what stands beside the rows.
    """

    path: str
    coded: Coded
    shape: tuple[int, ...]
    beside: NDArray[np.uint32] | None = None

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Of the bytes that are stored."""
        form = split_exponents if self.coded.coding == SPLIT else stored_planes
        return form.stored_shape(self.shape)

    @property
    def specs(self) -> list[Spec]:
        """What is stored in the place of the tensor, and is read for each sweep."""
        return [(self.coded.name(self.path), mx.uint8, self.stored_shape)]

    @property
    def specs_beside(self) -> list[Spec]:
        """What is stored elsewhere, and stays in memory."""
        if self.beside is None:
            return []
        return [(self.coded.beside(self.path), mx.uint32, self.beside.shape)]

    def encoded(self, plain: Plain) -> Iterator[memoryview]:
        """The bytes that are stored of the tensor's own."""
        if self.beside is None:
            words = _elements(self.path, plain, self.shape, "<u4")
            yield from stored_planes.encoded(words, self.coded.bits, self.coded.high)
            return
        words = _elements(self.path, plain, self.shape, "<u2")
        for rows in split_exponents.blocks_of_rows(self.shape[0], 2 * self.shape[1]):
            yield split_exponents.encoded(words[rows], self.beside).reshape(-1).data


def choose(
    layers: Sequence[Layer], pieces: dict[str, Plain], told: Callable[[str], None] = lambda _: None
) -> dict[str, Coding]:
    """The codings of these layers' tensors. Reads them all, one after the other.

    Args:
        pieces: their bytes; what was looked at is taken out.
        told: called with each layer's path.
    """
    found = {}
    for layer in layers:
        told(layer.path)
        for p in layer.parameters:
            path = f"{layer.path}.{p.path}"
            shape = tuple(p.array.shape)
            plain = pieces.pop(path, None)
            quantized = p.key in ("scales", "biases")
            if p.array.dtype == mx.bfloat16 and not quantized and split_exponents.could_be_split(shape):
                assert plain is not None
                words = _elements(path, plain, shape, "<u2")
                beside = split_exponents.beside_rows(words)
                stored = round_up(int(np.prod(split_exponents.stored_shape(shape))), BLOCK)
                if beside is not None and stored + beside.nbytes < round_up(words.nbytes, BLOCK):
                    checksum = xxhash.xxh3_128_hexdigest(words.data)
                    found[path] = Coding(path, Coded(coding=SPLIT, checksum=checksum), shape, beside)
    return found


def choose_planes(
    layers: Sequence[Layer], high: int, pieces: dict[str, Plain], told: Callable[[str], None] = lambda _: None
) -> dict[str, Coding]:
    """The same of a copy whose codes are cut above all but their ``high`` highest bits, in the layers that can draft
    with them. Reads what is cut."""
    found = {}
    for layer in layers:
        told(layer.path)
        for at, module in cut_modules(layer, high):
            path, shape = f"{layer.path}.{at}.weight", tuple(module.weight.shape)
            if path in pieces and stored_planes.could_be_cut(shape, module.bits, high):
                checksum = digest_of(path, pieces.pop(path))
                found[path] = Coding(path, Coded(coding=PLANES, checksum=checksum, bits=module.bits, high=high), shape)
        for p in layer.parameters:
            pieces.pop(f"{layer.path}.{p.path}", None)
    return found


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
        del made[path]
        made[coding.coded.name(path)] = Encoding(coding.stored_shape, partial(coding.encoded, pieces[path]))
        if coding.beside is not None:
            made[coding.coded.beside(path)] = mx.array(coding.beside)
    return made


def _elements(path: str, plain: Plain, shape: Sequence[int], dtype: str) -> Any:
    """All of a tensor's elements, in memory."""
    buffer = np.empty(int(np.prod(shape)) * np.dtype(dtype).itemsize, np.uint8)
    at = 0
    for data in piece_bytes(path, plain):
        part = np.frombuffer(data, np.uint8)
        buffer[at : at + part.size] = part
        at += part.size
    if at < buffer.size:
        raise StoreError(f"{path!a} is not as it was; the model changed while it was packed")
    return buffer.view(dtype).reshape(tuple(shape))


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
        try:
            if coded.coding == SPLIT:
                shape, dtype = (stored.shape[0], stored.shape[1] // 3 * 2), "BF16"
                decoders[path] = _split(used.pop(coded.beside(path)), stored.shape, shape)
            else:
                shape, dtype = (stored.shape[0], stored.shape[1] // 4), "U32"
                decoders[path] = _planes(path, stored, shape, coded)
        except (KeyError, ValueError) as error:
            raise StoreError(f"{stored.file}: {path[:120]!a} cannot be decoded; {AGAIN}") from error
        used[path] = replace(stored, name=path, dtype=dtype, shape=shape, stored=(stored.dtype, stored.shape))
    return used, decoders


def _split(beside: TensorInfo, stored: tuple[int, ...], shape: tuple[int, ...]) -> split_exponents.SplitDecoder:
    if (
        not split_exponents.could_be_split(shape)
        or stored[1] != shape[1] // 2 * 3
        or beside.dtype != "U32"
        or len(beside.shape) != 1
    ):
        raise ValueError("of another form")
    try:
        found = np.fromfile(beside.file, "<u4", beside.shape[0], offset=beside.offset)
    except OSError as error:
        raise StoreError(f"{beside.file}: cannot be read ({error.strerror}); {AGAIN}") from error
    return split_exponents.SplitDecoder.of(shape, found)


def _planes(path: str, stored: TensorInfo, shape: tuple[int, ...], coded: Coded) -> stored_planes.Planes:
    whole = stored.shape[1] % 4 == 0 and stored_planes.could_be_cut(shape, coded.bits, coded.high)
    if not whole or not path.endswith(".weight"):
        raise ValueError("of another form")
    return stored_planes.Planes(shape, coded.bits, coded.high)
