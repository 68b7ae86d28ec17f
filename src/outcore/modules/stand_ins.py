"""Stand-ins for weights, which hold no memory and are never evaluated, while a model's forward pass is built once."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .call_values import caches_in
from .hooks import Call, absent, put, swap, unswap
from .layers import Layer, Projection
from .module_tree import modules

Casts = Callable[[str, mx.Dtype], mx.Dtype | None]


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Some modules keep products of their weights from the first call on; those of a rehearsal must not stay."""
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
    """Units with stand-ins for weights, which are there during a unit's own call only; and what calls them.

    Args:
        layers: so many units are layers, the others tables.
        split: pieces of the layers that have more than one.
        routed: by layer, modules that are called with numbers of experts.

    Attributes:
        order, looked_up, used: as in ``Trace``; of the pass that began last, or of all.
        calls: pieces in the order of their calls, by layer. ``given``: caches that each layer was called with.
        hidden: bytes of the largest first argument of a layer; ``beside``: all others that are arrays, each once.
    """

    def __init__(
        self,
        units: Sequence[Layer],
        layers: int,
        split: Mapping[int, Sequence[Projection]],
        cast: Casts,
        foreign: bool,
        routed: Mapping[int, Sequence[nn.Module]],
    ) -> None:
        self.order, self.looked_up, self.used = list[int](), set[int](), dict[int, int]()
        self.begin()
        self._units, self._layers, self._split, self._routed = units, layers, split, routed
        self._weights = [[p.array for p in unit.parameters] for unit in units]
        computed = [
            [cast(f"{unit.path}.{p.path}", p.array.dtype) or p.array.dtype for p in unit.parameters] for unit in units
        ]
        self._stand_ins = stand_ins(self._weights, computed, foreign)

    def begin(self) -> None:
        """Another pass begins."""
        self.order.clear()
        self.calls: dict[int, list[int]] = {}
        self.given: dict[int, list[Any]] = {}
        self.hidden, self.beside = 0, dict[int, mx.array]()

    def __enter__(self) -> StandIns:
        return self

    def __exit__(self, *_: object) -> None:
        for unit in self._units:
            unswap(unit.module)
        for parts in self._split.values():
            for piece in parts:
                unswap(piece.module)
        for routed in self._routed.values():
            for module in routed:
                unswap(module)

    def set(self) -> None:
        """Take the weights away, and lead calls through here."""
        for i, unit in enumerate(self._units):
            put(unit.parameters, absent(self._weights[i]))
            ordered = self._with_weights(i, range(len(unit.parameters)), functools.partial(self.order.append, i))
            if i in self._split:
                swap(unit.module, "Rehearsed", self._noted(i))
                for n, piece in enumerate(self._split[i]):
                    swap(piece.module, "Rehearsed", self._piece(i, n, piece))
                for module in self._routed.get(i, ()):
                    swap(module, "Rehearsed", self._chosen(i))
            elif i >= self._layers and isinstance(unit.module, nn.Embedding | nn.QuantizedEmbedding):
                looked_up = self._with_weights(i, range(len(unit.parameters)), functools.partial(self.looked_up.add, i))
                swap(unit.module, "Rehearsed", looked_up, ordered)
            else:
                swap(unit.module, "Rehearsed", ordered)

    def _piece(self, layer: int, number: int, piece: Projection) -> Call:
        return self._with_weights(
            layer, piece.parameters, lambda: self.calls.setdefault(layer, []).append(number), piece=True
        )

    def _with_weights(
        self, unit: int, numbers: Sequence[int], note: Callable[[], None], *, piece: bool = False
    ) -> Call:
        parameters = [self._units[unit].parameters[n] for n in numbers]
        arrays = [self._stand_ins[unit][n] for n in numbers]
        nothing = absent([self._weights[unit][n] for n in numbers])

        def call(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            note()
            if not piece:
                self._see(unit, args, kwargs)
            put(parameters, arrays)
            try:
                return original(*args, **kwargs)
            finally:
                put(parameters, nothing)

        return call

    def _noted(self, layer: int) -> Call:
        def call(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            self.order.append(layer)
            self._see(layer, args, kwargs)
            return original(*args, **kwargs)

        return call

    def _see(self, unit: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.given.setdefault(unit, []).extend(caches_in(args, kwargs))
        if unit < self._layers:
            arrays = _arrays([*args, *kwargs.values()])
            self.hidden = max(self.hidden, *(a.nbytes for a in arrays[:1]), 0)
            self.beside |= {id(a): a for a in arrays[1:]}

    def _chosen(self, layer: int) -> Call:
        def call(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            indices = kwargs["indices"] if "indices" in kwargs else args[1]
            self.used[layer] = indices.shape[-1]
            return original(*args, **kwargs)

        return call


def _arrays(values: Iterable[Any]) -> list[mx.array]:
    """Arrays, and those in sequences of them; not what caches hold."""
    parts = ([v] if isinstance(v, mx.array) else _arrays(v) if isinstance(v, list | tuple) else [] for v in values)
    return [a for part in parts for a in part]


def stand_ins(
    weights: Sequence[Sequence[mx.array]], dtypes: Sequence[Sequence[mx.Dtype]], foreign: bool
) -> list[list[mx.array]]:
    made: dict[tuple[tuple[int, ...], mx.Dtype], mx.array] = {}
    stream = _foreign_stream(mx.default_device().type) if foreign else None
    for arrays, computed in zip(weights, dtypes, strict=True):
        for a, dtype in zip(arrays, computed, strict=True):
            if (a.shape, dtype) not in made:
                zero = mx.zeros((1,) * a.ndim, dtype=dtype, stream=stream)
                made[a.shape, dtype] = mx.broadcast_to(zero, a.shape, stream=stream)
    return [
        [made[a.shape, dtype] for a, dtype in zip(arrays, computed, strict=True)]
        for arrays, computed in zip(weights, dtypes, strict=True)
    ]


@functools.cache
def _foreign_stream(device: mx.DeviceType) -> mx.Stream:
    """Another thread's stream of a device: one for all rehearsals, because MLX never ends the thread behind it."""
    made: list[mx.Stream] = []
    thread = threading.Thread(target=lambda: made.append(mx.default_stream(mx.Device(device))))
    thread.start()
    thread.join()
    return made[0]
