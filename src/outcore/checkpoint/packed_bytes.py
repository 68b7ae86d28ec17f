"""The bytes of a packed file in order: from the original's file where they lie there, else computed by MLX."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

from ..errors import StoreError
from .checkpoint import TensorInfo
from .lazy_model import DTYPES
from .packed_store import CHUNK, PackedFile, packed_header, packed_tensors

Plain = TensorInfo | mx.array
"""A parameter's bytes: a place on disk, or a lazy array."""


@dataclass(frozen=True)
class Encoding:
    """Bytes that are made of a parameter's when they are written."""

    shape: tuple[int, ...]
    encoded: Callable[[], Iterator[memoryview]]
    dtype: mx.Dtype = mx.uint8


Piece = Plain | Encoding
Pieces = dict[str, Piece]
"""Tensor's name → its bytes."""


def file_content(file: PackedFile, pieces: Pieces) -> Iterator[memoryview]:
    """All bytes of a packed file in order. What has been read of ``pieces`` is taken out, so that it can be freed."""
    head, _, size = packed_header(file.tensors)
    yield memoryview(head)
    end = len(head)
    for info, (_, dtype, _) in zip(packed_tensors(Path(file.name), file.tensors), file.tensors, strict=True):
        if info.offset > end:
            yield memoryview(bytes(info.offset - end))
        piece = pieces.pop(info.name, None)
        found = DTYPES[piece.dtype] if isinstance(piece, TensorInfo) else None if piece is None else piece.dtype
        if piece is None or found != dtype or tuple(piece.shape) != info.shape:
            raise StoreError(f"{file.unit}: {info.name!a} is not as it was; the model changed while it was packed")
        yield from piece_bytes(info.name, piece)
        del piece
        end = info.offset + info.nbytes
    if size > end:
        yield memoryview(bytes(size - end))


def piece_bytes(name: str, piece: Piece) -> Iterator[memoryview]:
    """All bytes of a tensor, in parts."""
    if isinstance(piece, TensorInfo):
        return file_bytes(piece, CHUNK)
    return array_bytes(name, piece) if isinstance(piece, mx.array) else piece.encoded()


def file_bytes(info: TensorInfo, step: int) -> Iterator[memoryview]:
    try:
        with info.file.open("rb", buffering=0) as file:
            file.seek(info.offset)
            left = info.nbytes
            while left:
                data = file.read(min(step, left))
                if not data:
                    raise StoreError(f"{info.file}: {info.name!a}: {left} bytes short; it changed while it was packed")
                left -= len(data)
                yield memoryview(data)
    except OSError as error:
        raise StoreError(f"{info.file}: {info.name!a}: cannot be read ({error.strerror}); check the disk") from error


def array_bytes(name: str, array: mx.array) -> Iterator[memoryview]:
    """The array's elements in row-major order. A view of another array (half of a fused weight) is copied in parts."""
    if not array.size:
        return
    try:
        mx.eval(array)
        rows = array if array.ndim else array.reshape(1)
        count = _rows(rows)
        for i in range(0, rows.shape[0], count):
            part = mx.contiguous(rows[i : i + count]).reshape(-1).view(mx.uint8)
            mx.eval(part)
            yield np.array(part, copy=False).data
    except RuntimeError as error:  # MLX's own: a file that has become shorter, no memory
        raise StoreError(f"{name!a}: MLX could not compute it: {' '.join(str(error).split())[:200]}") from error


def _rows(array: mx.array) -> int:
    """Rows of the first axis that are written at a time."""
    return max(1, CHUNK * array.shape[0] // array.nbytes) if array.ndim else 1


def same_bytes(array: mx.array, info: TensorInfo) -> bool:
    """Whether an array has the dtype, shape and bytes of a tensor on disk."""
    if DTYPES[info.dtype] != array.dtype or tuple(array.shape) != info.shape:
        return False
    step = _rows(array) * (array.nbytes // array.shape[0]) if array.ndim and array.size else CHUNK
    return all(a == b for a, b in zip(array_bytes(info.name, array), file_bytes(info, step), strict=True))
