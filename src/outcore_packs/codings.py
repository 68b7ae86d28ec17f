"""Encodes matrices of a packed copy in other forms (codings), and finds the decoders of stored ones. All are lossless.

There are two forms. ``planes`` (``stored_planes``) is chosen by shape and type alone. ``compact`` is chosen if it takes
fewer disk blocks; to know that, all values of a matrix are read.

``compact`` stores bfloat16 matrices in three quarters of their bytes, since trained weights have few different
exponents. Sign and mantissa of a weight are one byte. The exponent is a 4-bit code for one of the 16 most frequent ones
in the matrix; any other exponent is in a list of escapes. Positions are fixed, so a GPU decodes every weight
independently (SplitZip's layout). A row is stored as these bytes, then its codes, two per byte, the first in the lower
four bits. The side table, in 32-bit words: the 16 exponents in four words; where each row's escapes begin, and the end
of the last row's; and the escapes in order, as column * 256 + exponent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np
import xxhash
from numpy.typing import NDArray

from outcore.checkpoint.checkpoint import TensorInfo
from outcore.checkpoint.lazy_model import Decoder
from outcore.checkpoint.manifest import AGAIN, COMPACT, PLANES, SPLIT, Coded
from outcore.checkpoint.pack import Progress
from outcore.checkpoint.packed_bytes import Encoding, Pieces, Plain, Spec, piece_bytes
from outcore.errors import StoreError
from outcore.machine.device import on_cpu
from outcore.modules.layers import Layer
from outcore.sizes import BLOCK, round_up

from .stored_planes import Planes, could_be_cut, cut_modules, gpu_kernel

EXPONENTS = 16
# The number of columns is a multiple of this, so that rows are whole 32-bit words, and below 2 ** 24, to fit an escape.
COLUMNS = 8

# The largest side table, as a fraction of the matrix's bytes, since it stays in memory. (0.002 in a trained model.)
SIDE_TABLE = 1 / 16

ROWS_BYTES = 4 << 20  # Bytes of weights that are examined or encoded at a time.

Words = NDArray[np.uint16]
SideTable = NDArray[np.uint32]


def could_be_split(shape: tuple[int, ...]) -> bool:
    """Whether a bfloat16 matrix of this shape can be stored as ``compact``."""
    whole = len(shape) == 2 and shape[1] % COLUMNS == 0
    return whole and shape[0] > 1 and 0 < shape[1] < 1 << 24 and shape[0] * shape[1] < 1 << 31


def side_table_of(weights: Words) -> SideTable | None:
    """Returns the side table of bfloat16 weights, given as uint16; None if it would be too large."""
    counts = np.zeros(256, np.int64)
    for block in _blocks(weights):
        counts += np.bincount(_exponents(block).reshape(-1), minlength=256)
    table = np.sort(np.argsort(-counts, kind="stable")[:EXPONENTS]).astype(np.uint8)
    rows = weights.shape[0]
    escaped = int(counts.sum() - counts[table].sum())
    if 4 * (len(table) // 4 + rows + 1 + escaped) > SIDE_TABLE * weights.nbytes:
        return None
    is_escaped = np.ones(256, bool)
    is_escaped[table] = False
    found, each = [], []
    for block in _blocks(weights):
        exponents = _exponents(block)
        at = np.take(is_escaped, exponents)
        each.append(at.sum(axis=1, dtype=np.uint32))
        columns = np.nonzero(at)[1].astype(np.uint32)
        found.append(columns << 8 | exponents[at])
    starts = np.concatenate([np.zeros(1, np.uint32), np.cumsum(np.concatenate(each), dtype=np.uint32)])
    return np.concatenate([table.view("<u4"), starts, *found]).astype(np.uint32)


def _blocks(weights: Words) -> Iterator[Words]:
    step = max(1, ROWS_BYTES // (weights.shape[1] * 2))
    return (weights[begin : begin + step] for begin in range(0, len(weights), step))


def _exponents(weights: Words) -> NDArray[np.uint8]:
    return (weights >> 7).astype(np.uint8)


@dataclass(frozen=True)
class SplitDecoder:
    """Encodes and decodes one ``compact`` matrix. Its arrays stay in memory.

    Attributes:
        shape: of the weights.
        table: the exponents, uint8 (16,). ``escapes``: each row's start, then the escapes, uint32.
        at: position of each escape in the matrix, uint32; empty except on a CPU.
    """

    shape: tuple[int, ...]
    table: mx.array
    escapes: mx.array
    at: mx.array

    dtype: ClassVar[str] = "BF16"
    words: ClassVar[str] = "<u2"

    @classmethod
    def found(cls, stored: tuple[int, ...], _: Coded, side_table: SideTable | None) -> SplitDecoder:
        rows, columns = stored
        shape = rows, columns // 3 * 2
        if side_table is None or not could_be_split(shape):
            raise ValueError("of another form")
        return cls.of(shape, side_table)

    @classmethod
    def of(cls, shape: tuple[int, ...], side_table: SideTable) -> SplitDecoder:
        """Makes the decoder from the side table.

        Raises:
            ValueError: the table does not fit the matrix, so decoding would read out of bounds.
        """
        words = EXPONENTS // 4
        starts, escapes = side_table[words : words + shape[0] + 1], side_table[words + shape[0] + 1 :]
        whole = len(starts) == shape[0] + 1 and starts[0] == 0 and starts[-1] == len(escapes)
        if not whole or (starts[1:] < starts[:-1]).any() or (escapes >> 8 >= shape[1]).any():
            raise ValueError("escapes that are not of this matrix")
        at = np.repeat(np.arange(shape[0], dtype=np.uint32) * np.uint32(shape[1]), np.diff(starts)) + (escapes >> 8)
        return cls(
            shape,
            mx.array(side_table[:words].view(np.uint8)),
            mx.array(side_table[words:]),
            mx.array(at[: len(at) if on_cpu() else 0]),
        )

    @property
    def stored(self) -> mx.array:
        return mx.concatenate([self.table.view(mx.uint32), self.escapes])

    @property
    def stored_shape(self) -> tuple[int, ...]:
        return self.shape[0], self.shape[1] // 2 * 3

    def encoded(self, weights: Words) -> Iterator[memoryview]:
        code = np.zeros(256, np.uint8)
        code[np.array(self.table)] = np.arange(EXPONENTS)
        for rows in _blocks(weights):
            pairs = np.take(code, _exponents(rows)).view("<u2")
            signs = ((rows >> 8 & 0x80) | (rows & 0x7F)).astype(np.uint8)
            yield np.concatenate([signs, (pairs | pairs >> 4).astype(np.uint8)], axis=1).reshape(-1).data

    @property
    def nbytes(self) -> int:
        return int(self.table.nbytes + self.escapes.nbytes + self.at.nbytes)

    def decode(self, rows: mx.array) -> mx.array:
        if on_cpu():
            words = _by_operations(rows, self.table, self.escapes[self.shape[0] + 1 :], self.at)
        else:
            words = splitting_kernel()(rows, self.table, self.escapes)
        return words.view(mx.bfloat16)


def _by_operations(rows: mx.array, table: mx.array, escapes: mx.array, at: mx.array) -> mx.array:
    """Decodes on a CPU; returns uint16.

    One fused operation decodes all weights; the escapes are then written into its result. MLX allocates when it queues
    an operation, so with more operations intermediate results of several matrices would be in memory at once.
    """
    columns = rows.shape[1] // 3 * 2
    signs = rows[:, :columns]
    shape = rows.shape[0], columns // 2, 2
    words = _assembled()(signs.reshape(shape), rows[:, columns:, None], table.view(mx.uint64)).reshape(-1)
    if at.size:
        wide = signs[at // columns, escapes >> 8].astype(mx.uint32)
        words[at] = (((wide & 0x80) << 8) | ((escapes & 0xFF) << 7) | (wide & 0x7F)).astype(mx.uint16)
    return words.reshape(rows.shape[0], columns)


@cache
def _assembled() -> Callable[[mx.array, mx.array, mx.array], mx.array]:
    def assembled(signs: mx.array, pairs: mx.array, table: mx.array) -> mx.array:
        codes = (pairs >> mx.array([0, 4], mx.uint8)) & 0xF
        # The table is two integers whose bytes are the exponents.
        exponents = mx.where(codes < 8, table[0], table[1]) >> ((codes & 7) * 8).astype(mx.uint64)
        wide = signs.astype(mx.uint16)
        return ((wide & 0x80) << 8) | ((exponents.astype(mx.uint16) & 0xFF) << 7) | (wide & 0x7F)

    function: Callable[[mx.array, mx.array, mx.array], mx.array] = mx.compile(assembled)
    return function


@cache
def splitting_kernel() -> Callable[[mx.array, mx.array, mx.array], mx.array]:
    """Makes a GPU kernel; each of its threads decodes four weights."""
    kernel = gpu_kernel("split16", ("words", "halves", "exponents", "side_table", "sizes"), SPLITTING_SOURCE)

    def decode(rows: mx.array, table: mx.array, side_table: mx.array) -> mx.array:
        fours = rows.shape[1] // 6
        count = rows.shape[0] * fours
        arrays = [rows.view(mx.uint32), rows.view(mx.uint16), table, side_table, mx.array([count, fours], mx.uint32)]
        return kernel(arrays, count, (rows.shape[0], 2 * fours))

    return decode


# The kernel's source: C that both CUDA and Metal accept. Neighbouring threads read neighbouring words, since a slot may
# be read over a bus. ``SplitDecoder.of`` has checked the table's bounds.
SPLITTING_SOURCE = """if (at >= sizes[0]) return;
unsigned int row = at / sizes[1], four = at % sizes[1];
unsigned int bytes = words[row * (sizes[1] / 2 * 3) + four];
unsigned int codes = halves[row * (sizes[1] * 3) + sizes[1] * 2 + four];
unsigned int e0 = exponents[codes & 15u], e1 = exponents[(codes >> 4) & 15u];
unsigned int e2 = exponents[(codes >> 8) & 15u], e3 = exponents[codes >> 12];
unsigned int low = side_table[row], end = side_table[row + 1], first = sizes[0] / sizes[1] + 1;
unsigned int high = end;
while (low < high) {
  unsigned int middle = (low + high) / 2;
  if ((side_table[first + middle] >> 10) < four) low = middle + 1; else high = middle;
}
for (; low < end; low++) {
  unsigned int escape = side_table[first + low], column = escape >> 8;
  if (column >> 2 != four) break;
  unsigned int exponent = escape & 255u;
  if ((column & 3u) == 0u) e0 = exponent;
  else if ((column & 3u) == 1u) e1 = exponent;
  else if ((column & 3u) == 2u) e2 = exponent;
  else e3 = exponent;
}
out[2 * at] = (bytes & 127u) | (e0 << 7) | ((bytes & 128u) << 8)
  | (((bytes >> 8) & 127u) << 16) | (e1 << 23) | ((bytes & 32768u) << 16);
out[2 * at + 1] = ((bytes >> 16) & 127u) | (e2 << 7) | ((bytes >> 8) & 32768u)
  | (((bytes >> 24) & 127u) << 16) | (e3 << 23) | (bytes & 2147483648u);
"""


Form = SplitDecoder | Planes

# By the coding's name in manifests: a function that makes the form from the stored bytes' shape, the manifest's entry
# and the side table. It raises ``ValueError`` if these do not fit together.
FORMS: dict[str, Callable[[tuple[int, ...], Coded, Any], Form]] = {SPLIT: SplitDecoder.found, PLANES: Planes.found}


@dataclass(frozen=True)
class Coding:
    """The coding of one tensor: its path, its manifest entry, and the form that encodes and decodes it."""

    path: str
    coded: Coded
    form: Form

    @property
    def spec(self) -> Spec:
        """The tensor that is stored in place of this one and that each pass reads."""
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
    """Chooses the codings of these layers' tensors; returns them by path. Reads the tensors one after the other.

    Args:
        coding: of the copy: ``compact``, or ``planes:BITS`` for layers that can draft with BITS high bits.
        pieces: the sources of the tensors, by path; emptied.
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
    """Returns a matrix's ``compact`` form if it takes fewer disk blocks, else None."""
    side_table = side_table_of(words)
    if side_table is None:
        return None
    form = SplitDecoder.of(words.shape, side_table)
    less = round_up(prod(form.stored_shape), BLOCK) + side_table.nbytes < round_up(words.nbytes, BLOCK)
    return form if less else None


def with_codings(pieces: Mapping[str, Plain], codings: Mapping[str, Coding]) -> Pieces:
    """Returns the sources of what is written. ``pieces``: the sources of the tensors as they are used."""
    made: Pieces = dict(pieces)
    for path, coding in codings.items():
        made[coding.coded.name(path)] = Encoding(coding.form.stored_shape, partial(coding.encoded, pieces[path]))
        del made[path]
        made.update(coding.side_table)
    return made


def _elements(path: str, plain: Plain, shape: Sequence[int], dtype: str) -> Any:
    parts = [np.frombuffer(data, np.uint8).copy() for data in piece_bytes(path, plain)]
    if sum(part.size for part in parts) < prod(shape) * np.dtype(dtype).itemsize:
        raise StoreError(f"{path!a} changed while it was packed; pack the model again")
    return np.concatenate(parts).view(dtype).reshape(tuple(shape))


def as_used(
    folder: Path, tensors: Mapping[str, TensorInfo], codings: Mapping[str, Coded]
) -> tuple[dict[str, TensorInfo], dict[str, Decoder]]:
    """As in ``Codings``: returns the tensors as they are used and their decoders, and checks all. Reads side tables."""
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
