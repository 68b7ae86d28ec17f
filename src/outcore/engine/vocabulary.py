"""Embeddings and heads that are not in memory: rows are read from disk, and products are computed in slices of rows.

With a vocabulary of 250,000 words, untied embeddings and head take 1 to 2 GB each. A token needs one row of the
embeddings; and the head's output rows are independent, so slices of it can be streamed like layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..checkpoint.checkpoint import TensorInfo
from ..checkpoint.lazy_model import DTYPES
from ..disk.reader import RowReader
from ..modules.hooks import Call, put
from ..modules.layers import Layer

# Slices begin at multiples of so many rows, so that every row meets the same inner loop as in the whole product.
SLICE_STEP = 512


@dataclass(frozen=True)
class Table:
    """A table and its location.

    Attributes:
        layer: its module and parameters (weight, and scales and biases if quantized), rows first.
        places: location of each parameter on disk.
        casts: dtype that each parameter is computed in; None: as stored.
        looked_up: rows are looked up in it.
        multiplied: it is multiplied with, in slices if streamed.
        head: it is multiplied with after all layers, so only results depend on it. Layers use the products of other
            tables, such as projections of embeddings (gemma3n).
    """

    layer: Layer
    places: tuple[TensorInfo, ...]
    casts: tuple[mx.Dtype | None, ...]
    looked_up: bool
    multiplied: bool
    head: bool

    @property
    def row_bytes(self) -> int:
        return sum(info.nbytes // info.shape[0] for info in self.places)


@dataclass(frozen=True)
class StreamedTable:
    """A table that is not in memory. ``rows`` are the unit and the rows of each slice, if it is multiplied with;
    ``reader`` reads single rows, if they are looked up."""

    table: Table
    rows: tuple[tuple[int, slice], ...]
    reader: RowReader | None

    @property
    def module(self) -> nn.Module:
        return self.table.layer.module

    def rows_of(self, ids: mx.array) -> tuple[list[mx.array], mx.array]:
        """Reads the rows of ``ids`` from disk, each once.

        Evaluates ``ids``. Ids below 0 count from the end, as in MLX.

        Returns:
            the parameters with these rows only, and the indices of ``ids`` into them.
        """
        assert self.reader is not None
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

    def calls(self, enter: Callable[[int], Call]) -> tuple[Call, Call | None]:
        """Returns the replacements of the table's call and of its ``as_linear``; ``enter`` gives the call of a unit."""

        def multiply(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            if not self.rows:  # the first rank has the head
                return no_product(args[0], self.table.places[0].shape[0])
            module, parts = self.module, []
            bias = module.get("bias")  # 1-D, so it is resident
            try:
                for unit, rows in self.rows:
                    if bias is not None:
                        dict.__setitem__(module, "bias", bias[rows])
                    parts.append(enter(unit)(original, args, kwargs))
            finally:
                if bias is not None:
                    dict.__setitem__(module, "bias", bias)
            return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)

        embeds = isinstance(self.module, nn.Embedding | nn.QuantizedEmbedding)
        return (self._look_up, multiply) if embeds else (multiply, None)

    def _look_up(self, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        parameters = self.table.layer.parameters
        before = [p.array for p in parameters]
        arrays, ids = self.rows_of(args[0])
        put(parameters, arrays)
        try:
            return original(ids, *args[1:], **kwargs)
        finally:
            put(parameters, before)


def no_product(x: mx.array, rows: int) -> mx.array:
    """Returns zeros in place of logits, without memory, for ranks that sample no tokens."""
    return mx.broadcast_to(mx.zeros((1,), dtype=x.dtype), (*x.shape[:-1], rows))
