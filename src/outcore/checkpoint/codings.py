"""Which parameters of a model's layers a packed copy stores in another form, and the bytes that it stores of them.

A coding gives back every bit. What takes fewer bytes is chosen for each tensor by looking at all of its values: fewer
blocks on disk than the tensor itself. What can be cut into planes is seen by its form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import xxhash
from numpy.typing import NDArray

from ..disk.layout import BLOCK, round_up
from ..errors import StoreError
from ..modules import scale_steps, split_exponents
from ..modules.layers import Layer, Parameter
from . import stored_planes
from .manifest import PLANES, SPLIT, STEPS, Coded
from .nested import cut_modules
from .packed_bytes import Encoding, Pieces, Plain, piece_bytes
from .packed_store import Spec

Words = NDArray[np.uint16]


@dataclass(frozen=True)
class Coding:
    """How one tensor is stored.

    Attributes:
        beside: of ``split16``, what stands beside the rows.
    """

    path: str
    coded: Coded
    shape: tuple[int, ...]
    beside: NDArray[np.uint32] | None = None

    @property
    def specs(self) -> list[Spec]:
        """What is stored in the place of the tensor, and is read for each sweep."""
        forms = {SPLIT: split_exponents, STEPS: scale_steps, PLANES: stored_planes}
        shape = forms[self.coded.coding].stored_shape(self.shape)
        return [(self.coded.name(self.path), mx.uint8, shape)]

    @property
    def specs_beside(self) -> list[Spec]:
        """What is stored elsewhere, and stays in memory."""
        if self.beside is None:
            return []
        return [(self.coded.beside(self.path), mx.uint32, self.beside.shape)]


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
        biases = {id(p.module): f"{layer.path}.{p.path}" for p in layer.parameters if p.key == "biases"}
        for p in layer.parameters:
            path = f"{layer.path}.{p.path}"
            coding = _of_scales(path, biases[id(p.module)], p, pieces) if _has_steps(p, biases) else None
            if _could_be_split(p):
                coding = _of_exponents(path, p.array.shape, pieces)
            if coding is not None:
                found[path] = coding
        for p in layer.parameters:
            pieces.pop(f"{layer.path}.{p.path}", None)
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


def _could_be_split(p: Parameter) -> bool:
    quantized = p.key in ("scales", "biases")
    return p.array.dtype == mx.bfloat16 and not quantized and split_exponents.could_be_split(p.array.shape)


def _has_steps(p: Parameter, biases: Mapping[int, str]) -> bool:
    module = p.module
    if p.key != "scales" or id(module) not in biases or not isinstance(module, nn.QuantizedLinear):
        return False
    affine = module.mode == "affine" and module.bits == scale_steps.BITS
    both = [module.scales, module.biases]
    return affine and all(a.dtype == mx.bfloat16 and a.ndim == 2 for a in both)


def _of_exponents(path: str, shape: tuple[int, ...], pieces: Mapping[str, Plain]) -> Coding | None:
    words = _whole(path, pieces[path], shape)
    beside = split_exponents.beside_rows(words)
    if beside is None or _blocks(split_exponents.stored_shape(shape)) + beside.nbytes >= round_up(words.nbytes, BLOCK):
        return None
    return Coding(path, Coded(coding=SPLIT, checksum=_digest(words)), tuple(shape), beside)


def _of_scales(path: str, biases: str, p: Parameter, pieces: Mapping[str, Plain]) -> Coding | None:
    shape = tuple(p.array.shape)
    if _blocks(scale_steps.stored_shape(shape)) >= round_up(p.array.nbytes, BLOCK):
        return None
    scales = _whole(path, pieces[path], shape)
    if scale_steps.steps_of(scales, _whole(biases, pieces[biases], shape)) is None:
        return None
    return Coding(path, Coded(coding=STEPS, checksum=_digest(scales)), shape)


def _blocks(shape: tuple[int, ...]) -> int:
    return round_up(shape[0] * shape[1], BLOCK)


def _digest(words: Words) -> str:
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
        plain = pieces[path]
        del made[path]
        name = coding.coded.name(path)
        if coding.beside is not None:
            made[name] = _Rows(path, plain, coding.shape, coding.beside)
            made[coding.coded.beside(path)] = mx.array(coding.beside)
        elif coding.coded.coding == PLANES:
            made[name] = _Planes(path, plain, coding.shape, coding.coded.bits, coding.coded.high)
        else:
            biases = f"{path.removesuffix('scales')}biases"
            made[name] = _Steps(path, plain, biases, pieces[biases], coding.shape)
    return made


@dataclass(frozen=True)
class _Rows(Encoding):
    path: str
    plain: Plain
    of: tuple[int, ...]
    beside: NDArray[np.uint32]
    dtype: mx.Dtype = mx.uint8

    @property
    def shape(self) -> tuple[int, ...]:
        return split_exponents.stored_shape(self.of)

    def encoded(self) -> Iterator[memoryview]:
        words = _whole(self.path, self.plain, self.of)
        for rows in split_exponents.blocks_of_rows(self.of[0], 2 * self.of[1]):
            yield split_exponents.encoded(words[rows], self.beside).reshape(-1).data


@dataclass(frozen=True)
class _Steps(Encoding):
    path: str
    plain: Plain
    biases: str
    plain_biases: Plain
    of: tuple[int, ...]
    dtype: mx.Dtype = mx.uint8

    @property
    def shape(self) -> tuple[int, ...]:
        return scale_steps.stored_shape(self.of)

    def encoded(self) -> Iterator[memoryview]:
        scales, biases = _whole(self.path, self.plain, self.of), _whole(self.biases, self.plain_biases, self.of)
        steps = scale_steps.steps_of(scales, biases)
        if steps is None:
            raise StoreError(f"{self.path!a} is not as it was; the model changed while it was packed")
        yield steps.reshape(-1).data


@dataclass(frozen=True)
class _Planes(Encoding):
    path: str
    plain: Plain
    of: tuple[int, ...]
    bits: int
    high: int
    dtype: mx.Dtype = mx.uint8

    @property
    def shape(self) -> tuple[int, ...]:
        return stored_planes.stored_shape(self.of)

    def encoded(self) -> Iterator[memoryview]:
        words = _bytes(self.path, self.plain, 4 * int(np.prod(self.of))).view("<u4").reshape(self.of)
        yield from stored_planes.encoded(words, self.bits, self.high)


def _whole(path: str, plain: Plain, shape: Sequence[int]) -> Words:
    """A bfloat16 tensor's bits, in memory."""
    return _bytes(path, plain, 2 * int(np.prod(shape))).view("<u2").reshape(tuple(shape))


def _bytes(path: str, plain: Plain, nbytes: int) -> NDArray[np.uint8]:
    buffer = np.empty(nbytes, np.uint8)
    at = 0
    for data in piece_bytes(path, plain):
        part = np.frombuffer(data, np.uint8)
        buffer[at : at + part.size] = part
        at += part.size
    if at < buffer.size:
        raise StoreError(f"{path!a} is not as it was; the model changed while it was packed")
    return buffer
