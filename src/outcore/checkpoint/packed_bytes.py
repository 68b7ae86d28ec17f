"""The layout of a packed copy's files, and their bytes: copied from the original's file, or computed by MLX."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ..errors import StoreError
from ..sizes import BLOCK, round_up
from .checkpoint import TensorInfo
from .lazy_model import DTYPES

PAD = "__pad_"
CHUNK = 16 << 20  # bytes read or written at a time

# Without the fp8 names, which MLX also loads as uint8.
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items() if not name.startswith("F8")}

Spec = tuple[str, mx.Dtype, tuple[int, ...]]  # a tensor's name, dtype and shape


@dataclass(frozen=True)
class PackedFile:
    """The layout of one file of a packed copy.

    Attributes:
        unit: path of the layer whose parameters it holds, or ``non_layer``.
        tensors: its tensors in order; ``offsets``: their first bytes, multiples of 4096.
        head: the file's first bytes, up to the first tensor. ``nbytes``: the file's size.
    """

    name: str
    unit: str
    tensors: tuple[Spec, ...]
    offsets: tuple[int, ...]
    head: bytes = field(repr=False)
    nbytes: int

    def places(self, folder: Path) -> list[TensorInfo]:
        return [
            TensorInfo(name, folder / self.name, _DTYPE_NAMES[dtype], shape, offset, dtype.size * prod(shape))
            for (name, dtype, shape), offset in zip(self.tensors, self.offsets, strict=True)
        ]


def packed_file(name: str, unit: str, tensors: Mapping[str, mx.array] | Sequence[Spec]) -> PackedFile:
    if isinstance(tensors, Mapping):
        tensors = [(path, array.dtype, tuple(array.shape)) for path, array in tensors.items()]
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    starts: list[int] = []
    end = 0
    for tensor, dtype, shape in tensors:
        if tensor in header or tensor.startswith(PAD):
            raise StoreError(f"tensor {tensor!r}: packed files cannot have this name; use the model unpacked")
        begin, end = end, end + dtype.size * prod(shape)
        starts.append(begin)
        header[tensor] = {"dtype": _DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        # The format allows no holes, so padding is a tensor. The last one fills the file's last block for direct reads.
        if pad := round_up(end, BLOCK) - end:
            header[f"{PAD}{len(starts) - 1}"] = {"dtype": "U8", "shape": [pad], "data_offsets": [end, end + pad]}
            end += pad
    text = json.dumps(header, separators=(",", ":")).encode()
    data = round_up(8 + len(text), BLOCK)
    head = (data - 8).to_bytes(8, "little") + text.ljust(data - 8)
    return PackedFile(name, unit, tuple(tensors), tuple(data + start for start in starts), head, data + end)


Plain = TensorInfo | mx.array  # the source of a parameter's bytes: a place on disk, or a lazy array


@dataclass(frozen=True)
class Encoding:
    """A tensor whose bytes are encoded when they are written."""

    shape: tuple[int, ...]
    encoded: Callable[[], Iterator[memoryview]]
    dtype: mx.Dtype = mx.uint8


Piece = Plain | Encoding
Pieces = dict[str, Piece]  # by tensor name


def file_content(file: PackedFile, pieces: Pieces) -> Iterator[memoryview]:
    """Yield all bytes of a packed file in order. Removes each piece from ``pieces`` when it is read, to free memory."""
    yield memoryview(file.head)
    end = len(file.head)
    for info, (_, dtype, _) in zip(file.places(Path()), file.tensors, strict=True):
        if info.offset > end:
            yield memoryview(bytes(info.offset - end))
        piece = pieces.pop(info.name, None)
        found = DTYPES[piece.dtype] if isinstance(piece, TensorInfo) else None if piece is None else piece.dtype
        if piece is None or found != dtype or tuple(piece.shape) != info.shape:
            raise StoreError(f"{file.unit}: {info.name!a} changed while it was packed; pack the model again")
        yield from piece_bytes(info.name, piece)
        del piece
        end = info.offset + info.nbytes
    if file.nbytes > end:
        yield memoryview(bytes(file.nbytes - end))


def piece_bytes(name: str, piece: Piece) -> Iterator[memoryview]:
    if not isinstance(piece, TensorInfo):
        yield from array_bytes(name, piece) if isinstance(piece, mx.array) else piece.encoded()
        return
    try:
        with piece.file.open("rb", buffering=0) as file:
            file.seek(piece.offset)
            left = piece.nbytes
            while left:
                data = file.read(min(CHUNK, left))
                if not data:
                    raise StoreError(f"{piece.file}: {name!a}: {left} bytes missing; the file changed: pack again")
                left -= len(data)
                yield memoryview(data)
    except OSError as error:
        raise StoreError(f"{piece.file}: {name!a}: cannot be read ({error.strerror}); check the disk") from error


def array_bytes(name: str, array: mx.array) -> Iterator[memoryview]:
    """Yield the array's bytes in row-major order, some rows at a time: a view (such as half of a fused weight) has to
    be copied, and a copy of all its rows would take as much memory again."""
    if not array.size:
        return
    try:
        mx.eval(array)
        rows = array if array.ndim else array.reshape(1)
        count = max(1, CHUNK * rows.shape[0] // rows.nbytes)
        for i in range(0, rows.shape[0], count):
            part = mx.contiguous(rows[i : i + count]).reshape(-1).view(mx.uint8)
            mx.eval(part)
            yield np.array(part, copy=False).data
    except RuntimeError as error:  # raised by MLX: a file became shorter, or out of memory
        raise StoreError(f"{name!a}: MLX could not compute it: {' '.join(str(error).split())[:200]}") from error
