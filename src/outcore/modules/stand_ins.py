"""Placeholders for weights while a model's forward pass is traced: they hold no memory and are never evaluated."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .hooks import Call, absent, caches_in, put, swap, unswap
from .layers import Layer, Projection, modules

Casts = Callable[[str, mx.Dtype], mx.Dtype | None]


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Restore all modules' contents and attributes after the block: some modules cache results of their weights."""
    before = [(m, dict(m), dict(m.__dict__)) for m in modules(model)]
    try:
        yield
    finally:
        for module, items, attributes in before:
            dict.clear(module)
            dict.update(module, items)
            module.__dict__.clear()
            module.__dict__.update(attributes)


class StandIns:
    """Gives units placeholder weights during their own calls only, and records the calls.

    Args:
        layers: how many of the units are layers; the units after these are tables.
        split: the pieces of each layer that has more than one.
        switches: by layer, the modules that are called with expert indices.

    Attributes:
        order, used: as in ``Trace``; ``order`` is that of the current pass. ``looked_up``: by table, its rows.
        calls: by layer, its pieces in call order. ``given``: by unit, the caches passed to it.
        hidden: bytes of the largest first array argument of a layer. ``extra``: the other arguments, by ``id()``.
    """

    def __init__(
        self,
        units: Sequence[Layer],
        layers: int,
        split: Mapping[int, Sequence[Projection]],
        cast: Casts,
        foreign: bool,
        switches: Mapping[int, Sequence[nn.Module]],
    ) -> None:
        self.order, self.looked_up, self.used = list[int](), Counter[int](), dict[int, int]()
        self.begin()
        self._units, self._layers, self._split, self._switches = units, layers, split, switches
        self._swapped: list[nn.Module] = []
        self._arrays = stand_ins(units, cast, foreign)

    def begin(self) -> None:
        self.order.clear()
        self.calls: dict[int, list[int]] = {}
        self.given: dict[int, list[Any]] = {}
        self.hidden, self.extra = 0, dict[int, mx.array]()

    def __enter__(self) -> StandIns:
        for i, unit in enumerate(self._units):
            see = functools.partial(self._see, i, self.order.append)
            put(unit.parameters, absent([p.array for p in unit.parameters]))
            if i in self._split:
                self._swap(unit.module, see)
                calls = functools.partial(self._piece_called, i)
                for n, piece in enumerate(self._split[i]):
                    self._swap(piece.module, functools.partial(calls, n), i, piece.parameters)
                for module in self._switches.get(i, ()):
                    self._swap(module, functools.partial(self._routed, i))
                continue
            numbers = range(len(unit.parameters))
            looks_up = i >= self._layers and isinstance(unit.module, nn.Embedding | nn.QuantizedEmbedding)
            if looks_up:
                looked_up = functools.partial(self._looked_up, i)
                self._swap(unit.module, looked_up, i, numbers, self._with_weights(see, i, numbers))
            else:
                self._swap(unit.module, see, i, numbers)
        return self

    def __exit__(self, *_: object) -> None:
        for module in self._swapped:
            unswap(module)

    def _swap(
        self,
        module: nn.Module,
        note: Callable[[Any, Any], None],
        unit: int = 0,
        numbers: Sequence[int] = (),
        product: Call | None = None,
    ) -> None:
        """Wrap a module: each call calls ``note`` and gives placeholders to parameters ``numbers`` of ``unit``."""
        swap(module, "Traced", self._with_weights(note, unit, numbers), product)
        self._swapped.append(module)

    def _with_weights(self, note: Callable[[Any, Any], None], unit: int, numbers: Sequence[int]) -> Call:
        parameters = [self._units[unit].parameters[n] for n in numbers]
        arrays, nothing = [self._arrays[unit][n] for n in numbers], absent([p.array for p in parameters])

        def call(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            note(args, kwargs)
            put(parameters, arrays)
            try:
                return original(*args, **kwargs)
            finally:
                put(parameters, nothing)

        return call

    def _see(self, unit: int, called: Callable[[int], None], args: Any, kwargs: Any) -> None:
        called(unit)
        self.given.setdefault(unit, []).extend(caches_in(args, kwargs))
        if unit < self._layers:
            arrays = _arrays([*args, *kwargs.values()])
            self.hidden = max(self.hidden, *(a.nbytes for a in arrays[:1]), 0)
            self.extra |= {id(a): a for a in arrays[1:]}

    def _looked_up(self, table: int, args: Any, kwargs: Any) -> None:
        self.looked_up[table] += args[0].size

    def _piece_called(self, layer: int, piece: int, args: Any, kwargs: Any) -> None:
        self.calls.setdefault(layer, []).append(piece)

    def _routed(self, layer: int, args: Any, kwargs: Any) -> None:
        self.used[layer] = (kwargs["indices"] if "indices" in kwargs else args[:2][-1]).shape[-1]


def _arrays(values: Iterable[Any]) -> list[mx.array]:
    parts = ([v] if isinstance(v, mx.array) else _arrays(v) if isinstance(v, list | tuple) else [] for v in values)
    return [a for part in parts for a in part]


def stand_ins(units: Sequence[Layer], cast: Casts, foreign: bool) -> list[list[mx.array]]:
    """Return, by unit, an array for each parameter, of its shape and computed dtype; the arrays take no memory.

    ``foreign``: they belong to another thread's stream, so that evaluating them raises an error.
    """
    made: dict[tuple[tuple[int, ...], mx.Dtype], mx.array] = {}
    stream = _foreign_stream(mx.default_device().type) if foreign else None

    def stand_in(path: str, a: mx.array) -> mx.array:
        dtype = cast(path, a.dtype) or a.dtype
        if (a.shape, dtype) not in made:
            zero = mx.zeros((1,) * a.ndim, dtype=dtype, stream=stream)
            made[a.shape, dtype] = mx.broadcast_to(zero, a.shape, stream=stream)
        return made[a.shape, dtype]

    return [[stand_in(f"{unit.path}.{p.path}", p.array) for p in unit.parameters] for unit in units]


@functools.cache
def _foreign_stream(device: mx.DeviceType) -> mx.Stream:
    """Return a stream of another thread. All traces share it, because MLX never ends a stream's own thread."""
    made: list[mx.Stream] = []
    thread = threading.Thread(target=lambda: made.append(mx.default_stream(mx.Device(device))))
    thread.start()
    thread.join()
    return made[0]
