"""Embeddings and heads that are not in memory: rows are looked up on disk, products computed in slices of rows.

A vocabulary of 250,000 words weighs 1 to 2 GB twice where embeddings and head are untied. A token needs one row of
the embeddings; and the head's output rows do not depend on each other, so slices of it can be streamed like layers.
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

SLICE_STEP = 512
"""Rows. Slices begin at multiples of this, so that every row meets the same inner loop as in the whole product."""


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


@dataclass(frozen=True)
class StreamedTable:
    """A table that is not in memory.

    Attributes:
        rows: for each of its slices, the unit of the ring and the rows that it holds; empty where it is not multiplied
            with.
        reader: reads rows; None where it is not looked up in.
    """

    table: Table
    rows: tuple[tuple[int, slice], ...]
    reader: RowReader | None

    @property
    def module(self) -> nn.Module:
        """Whose weights it is."""
        return self.table.layer.module

    def rows_of(self, ids: mx.array) -> tuple[list[mx.array], mx.array]:
        """Parameters that hold the rows of ``ids`` only, each once, read from disk; and the ids' places among them.

        Evaluates ``ids``. Ids below 0 count from the end, as in MLX.
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
        """What the table's call goes through, and its ``as_linear``; ``enter`` gives the call of a unit."""

        def multiply(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            if not self.rows:  # the first rank of several has the head
                return no_product(args[0], self.table.places[0].shape[0])
            module, parts = self.module, []
            bias = module.get("bias")  # 1-D, and in memory
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
    """What a head gives on ranks that choose no tokens: zeros in place of logits, of which nothing is in memory."""
    return mx.broadcast_to(mx.zeros((1,), dtype=x.dtype), (*x.shape[:-1], rows))
