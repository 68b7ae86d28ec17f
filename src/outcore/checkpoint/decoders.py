"""From a tensor as a packed copy stores it in another form to the one that a model uses: every bit of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ..errors import StoreError
from ..modules.split_exponents import SplitDecoder, could_be_split
from .checkpoint import TensorInfo
from .lazy_model import Decoder
from .manifest import AGAIN, SPLIT, Coded
from .stored_planes import Planes, could_be_cut


@dataclass(frozen=True)
class Decoded:
    """A copy's tensors as they are used, and what decodes those that have a coding; both by their names."""

    tensors: dict[str, TensorInfo]
    decoders: dict[str, Decoder]


def as_used(folder: Path, tensors: Mapping[str, TensorInfo], codings: Mapping[str, Coded]) -> Decoded:
    """Of the tensors that a copy's files have, believing nothing. What decoders hold is read.

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
    return Decoded(used, decoders)


def _split(beside: TensorInfo, stored: tuple[int, ...], shape: tuple[int, ...]) -> SplitDecoder:
    if not could_be_split(shape) or stored[1] != shape[1] // 2 * 3 or beside.dtype != "U32" or len(beside.shape) != 1:
        raise ValueError("of another form")
    try:
        found = np.fromfile(beside.file, "<u4", beside.shape[0], offset=beside.offset)
    except OSError as error:
        raise StoreError(f"{beside.file}: cannot be read ({error.strerror}); {AGAIN}") from error
    return SplitDecoder.of(shape, found)


def _planes(path: str, stored: TensorInfo, shape: tuple[int, ...], coded: Coded) -> Planes:
    whole = stored.shape[1] % 4 == 0 and could_be_cut(shape, coded.bits, coded.high)
    if not whole or not path.endswith(".weight"):
        raise ValueError("of another form")
    return Planes(shape, coded.bits, coded.high)
