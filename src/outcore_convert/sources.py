"""Where a parameter comes from, and its rows, some at a time: casting and quantizing need no more at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import mlx.core as mx
import numpy as np

from outcore.checkpoint.checkpoint import TensorInfo
from outcore.checkpoint.lazy_model import DTYPES
from outcore.errors import CheckpointError


@dataclass(frozen=True)
class Source:
    """A parameter as mlx-lm loads it. ``held``: bytes in memory besides the rows; 0: read in parts. ``rows`` yields
    all rows in order, at most so many in one two-dimensional array, and can be called once."""

    dtype: mx.Dtype
    shape: tuple[int, ...]
    held: int
    rows: Callable[[int], Iterator[mx.array]]

    @property
    def row_bytes(self) -> int:
        return max(1, self.dtype.size * (self.shape[-1] if self.shape else 1))


def on_disk(info: TensorInfo) -> Source:
    return Source(DTYPES[info.dtype], info.shape, 0, partial(_read, info))


def computed(parts: list[mx.array], made: mx.array) -> Source:
    """An array that is computed, and stacked of ``parts``, one of which is in memory with what it is made of."""
    held = 2 * made.nbytes // max(1, len(parts))
    return Source(made.dtype, tuple(made.shape), held, partial(_compute, list(reversed(parts)), made.dtype))


def _read(info: TensorInfo, most: int) -> Iterator[mx.array]:
    columns, kind = info.shape[-1] if info.shape else 1, DTYPES[info.dtype]
    left, each = info.nbytes, most * columns * kind.size
    try:
        with info.file.open("rb", buffering=0) as file:
            file.seek(info.offset)
            while left:
                part = bytearray(min(each, left))
                view = memoryview(part)
                while view:
                    if not (found := file.readinto(view)):
                        raise CheckpointError(
                            f"{info.file}: {info.name!a}: {left} bytes are missing; download it again"
                        )
                    view = view[found:]
                left -= len(part)
                yield mx.array(np.frombuffer(part, np.uint8)).view(kind).reshape(-1, columns)
    except OSError as error:
        raise CheckpointError(f"{info.file}: {info.name!a}: cannot be read ({error.strerror})") from error


def _compute(parts: list[mx.array], kind: mx.Dtype, most: int) -> Iterator[mx.array]:
    while parts:
        part = parts.pop().astype(kind)
        mx.eval(part)
        yield from _split(part, most)


def _split(array: mx.array, most: int) -> Iterator[mx.array]:
    if array.ndim < 2:
        yield array.reshape(1, -1)
    elif (inside := prod(array.shape[1:-1])) > most:
        for i in range(array.shape[0]):
            yield from _split(array[i], most)
    else:
        count = max(1, most // max(1, inside))
        for i in range(0, array.shape[0], count):
            yield array[i : i + count].reshape(-1, array.shape[-1])


Stacks = dict[int, tuple[mx.array, list[mx.array]]]  # by id: what was stacked, and its parts


@contextmanager
def noting_stacks() -> Iterator[Stacks]:
    """Notes what ``mx.stack`` stacks along the first axis in this block, such as experts in ``sanitize``."""
    found: Stacks = {}
    stack = mx.stack

    def noting(arrays: Sequence[mx.array], *args: Any, **named: Any) -> mx.array:
        made = stack(parts := list(arrays), *args, **named)
        if (args[0] if args else named.get("axis", 0)) == 0 and made.ndim > 2:
            found[id(made)] = made, parts
        return made

    vars(mx)["stack"] = noting
    try:
        yield found
    finally:
        vars(mx)["stack"] = stack


def sources_of(
    parameters: Mapping[str, mx.array], origins: Mapping[str, TensorInfo], stacks: Stacks
) -> dict[str, Source]:
    def source(path: str, array: mx.array) -> Source:
        if path in origins:
            return on_disk(origins[path])
        return computed(stacks[id(array)][1] if id(array) in stacks else [array], array)

    return {path: source(path, array) for path, array in parameters.items()}
