"""Embeddings and heads that are not in memory: rows are looked up on disk, products computed in slices of rows.

A vocabulary of 250,000 words weighs 1 to 2 GB twice where embeddings and head are untied. A token needs one row of
the embeddings; and the head's output rows do not depend on each other, so slices of it can be streamed like layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..checkpoint.checkpoint import TensorInfo
from ..checkpoint.lazy_model import DTYPES
from ..disk.layout import Source, Unit, place_unit
from ..disk.reader import RowReader
from ..modules.hooks import Call, put
from ..modules.layers import Layer
from ..sizes import BLOCK, round_up

SLICE_STEP = 512
"""Rows. Slices begin at multiples of this, so that every row meets the same inner loop as in the whole product."""


@dataclass(frozen=True)
class Slice:
    """Rows ``begin`` to ``end`` of a table, as a unit of the ring."""

    begin: int
    end: int
    unit: Unit


@dataclass(frozen=True)
class Table:
    """A table and where it lies.

    Attributes:
        layer: its module and parameters (weight, and scales and biases where it is quantized), rows first.
        places: where each of them lies on disk.
        casts: the dtype that each is computed in, where it differs from the one on disk.
        looked_up: rows of it are looked up. ``multiplied``: there are products with it, which slices can serve.
        head: products only behind all layers, so that only results are made from them. Layers compute with those before
            them, such as projections of embeddings (gemma3n).
    """

    layer: Layer
    places: tuple[TensorInfo, ...]
    casts: tuple[mx.Dtype | None, ...]
    looked_up: bool
    multiplied: bool
    head: bool

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, all parameters together."""
        return sum(info.nbytes // info.shape[0] for info in self.places)


def slices_of(layer: Layer, places: Sequence[TensorInfo], largest: int, *, direct: bool, align: int) -> list[Slice]:
    """Cut a table into slices that take at most ``largest`` bytes of a slot each, in steps of ``SLICE_STEP`` rows.

    As equal as steps allow; slices of one step where that is more than ``largest``.
    """
    rows = places[0].shape[0]
    # Each parameter may begin and end anywhere in a block.
    room = largest - len(places) * 2 * BLOCK
    most = max(1, room // (sum(info.nbytes for info in places) // rows) // SLICE_STEP) * SLICE_STEP
    parts = -(-rows // most)
    count = round_up(-(-rows // parts), SLICE_STEP)
    return [
        Slice(begin, end, _slice(layer, places, begin, end, direct, align))
        for begin in range(0, rows, count)
        for end in [min(rows, begin + count)]
    ]


def smallest_slice(layer: Layer, places: Sequence[TensorInfo], *, direct: bool, align: int) -> int:
    """Bytes of a slot that the smallest slices take."""
    slices = slices_of(layer, places, 0, direct=direct, align=align)
    return max(s.unit.slot_bytes for s in slices)


def _slice(layer: Layer, places: Sequence[TensorInfo], begin: int, end: int, direct: bool, align: int) -> Unit:
    sources = []
    for p, info in zip(layer.parameters, places, strict=True):
        row = info.nbytes // info.shape[0]
        shape = (end - begin, *info.shape[1:])
        sources.append(Source(p.path, info.dtype, shape, info.file, info.offset + begin * row, (end - begin) * row))
    return in_order(place_unit(f"{layer.path} rows {begin} to {end}", sources, direct=direct, align=align), layer)


def in_order(unit: Unit, layer: Layer) -> Unit:
    """The unit with its fields in the order of the layer's parameters: that is how they are bound."""
    by_path = {f.path: f for f in unit.fields}
    return Unit(unit.name, tuple(by_path[p.path] for p in layer.parameters), unit.extents, unit.slot_bytes)


class Lookup:
    """Rows of a table, read from disk for the ids at hand."""

    def __init__(self, table: Table, reader: RowReader) -> None:
        self.table = table
        self.reader = reader

    def __call__(self, ids: mx.array) -> tuple[list[mx.array], mx.array]:
        """Parameters that hold the rows of ``ids`` only, each once, and the ids' places among them.

        Evaluates ``ids``. Ids below 0 count from the end, as in MLX.
        """
        rows = self.table.places[0].shape[0]
        asked = np.array(ids).astype(np.int64)
        asked = np.where(asked < 0, asked + rows, asked).clip(0, rows - 1)
        unique, places = np.unique(asked, return_inverse=True)
        arrays = []
        for info, cast in zip(self.table.places, self.table.casts, strict=True):
            row = info.nbytes // rows
            data = self.reader.read(info.file, info.offset, row, unique.tolist(), self.table.layer.path)
            array = mx.array(data).view(DTYPES[info.dtype]).reshape(len(unique), *info.shape[1:])
            arrays.append(array if cast is None else array.astype(cast))
        return arrays, mx.array(places.reshape(asked.shape).astype(np.int32))

    def close(self) -> None:
        """Close the reader. Safe to call twice."""
        self.reader.close()


@dataclass(frozen=True)
class StreamedTable:
    """A table that is not in memory.

    Attributes:
        rows: for each of its slices, the unit of the ring and the rows that it holds; empty where it is not multiplied
            with.
        lookup: reads rows; None where it is not looked up in.
        head: as in ``Table``.
    """

    table: Layer
    rows: tuple[tuple[int, slice], ...]
    lookup: Lookup | None
    head: bool

    def calls(self, enter: Callable[[int], Call]) -> tuple[Call, Call | None]:
        """What the table's call goes through, and its ``as_linear``; ``enter`` gives the call of a unit."""
        if not isinstance(self.table.module, nn.Embedding | nn.QuantizedEmbedding):
            return self._multiply(enter), None
        return self._look_up, self._multiply(enter)

    def _multiply(self, enter: Callable[[int], Call]) -> Call:
        def call(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            if not self.rows:  # the first rank of several has the head
                assert self.lookup is not None
                return no_product(args[0], self.lookup.table.places[0].shape[0])
            parts = [
                enter(unit)(_with_rows_of_bias(original, self.table.module, rows), args, kwargs)
                for unit, rows in self.rows
            ]
            return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)

        return call

    def _look_up(self, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        assert self.lookup is not None
        parameters = self.table.parameters
        before = [p.array for p in parameters]
        arrays, ids = self.lookup(args[0])
        put(parameters, arrays)
        try:
            return original(ids, *args[1:], **kwargs)
        finally:
            put(parameters, before)


def no_product(x: mx.array, rows: int) -> mx.array:
    """What a head gives on ranks that choose no tokens: zeros in place of logits, of which nothing is in memory."""
    return mx.broadcast_to(mx.zeros((1,), dtype=x.dtype), (*x.shape[:-1], rows))


def _with_rows_of_bias(original: Callable[..., Any], module: nn.Module, rows: slice) -> Callable[..., Any]:
    """``original`` with only those rows of the bias, which is 1-D and in memory, that belong to a slice."""
    if "bias" not in module:
        return original

    def call(*args: Any, **kwargs: Any) -> Any:
        whole = module["bias"]
        dict.__setitem__(module, "bias", whole[rows])
        try:
            return original(*args, **kwargs)
        finally:
            dict.__setitem__(module, "bias", whole)

    return call
