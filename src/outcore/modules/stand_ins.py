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
    """Some modules keep products of their weights from the first call on; those of a traced pass must not stay."""
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
        switches: by layer, modules that are called with numbers of experts.

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
        switches: Mapping[int, Sequence[nn.Module]],
    ) -> None:
        self.order, self.looked_up, self.used = list[int](), set[int](), dict[int, int]()
        self.begin()
        self._units, self._layers, self._split, self._switches = units, layers, split, switches
        self._swapped: list[nn.Module] = []
        self._arrays = stand_ins(units, cast, foreign)

    def begin(self) -> None:
        """Another pass begins."""
        self.order.clear()
        self.calls: dict[int, list[int]] = {}
        self.given: dict[int, list[Any]] = {}
        self.hidden, self.beside = 0, dict[int, mx.array]()

    def __enter__(self) -> StandIns:
        """Take the weights away, and lead calls through here."""
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
                looked_up = functools.partial(self._see, i, self.looked_up.add)
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
        """Tell ``note`` of a module's calls, which these parameters of a unit are there for."""
        swap(module, "Rehearsed", self._with_weights(note, unit, numbers), product)
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
            self.beside |= {id(a): a for a in arrays[1:]}

    def _piece_called(self, layer: int, piece: int, args: Any, kwargs: Any) -> None:
        self.calls.setdefault(layer, []).append(piece)

    def _routed(self, layer: int, args: Any, kwargs: Any) -> None:
        self.used[layer] = (kwargs["indices"] if "indices" in kwargs else args[1]).shape[-1]


def _arrays(values: Iterable[Any]) -> list[mx.array]:
    """Arrays, and those in sequences of them; not what caches hold."""
    parts = ([v] if isinstance(v, mx.array) else _arrays(v) if isinstance(v, list | tuple) else [] for v in values)
    return [a for part in parts for a in part]


def stand_ins(units: Sequence[Layer], cast: Casts, foreign: bool) -> list[list[mx.array]]:
    """For each unit's parameters arrays of their shapes, and of the dtypes that they are computed in, which hold no
    memory; ``foreign``: of another thread's stream."""
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
    """Another thread's stream of a device: one for all traces, because MLX never ends the thread behind it."""
    made: list[mx.Stream] = []
    thread = threading.Thread(target=lambda: made.append(mx.default_stream(mx.Device(device))))
    thread.start()
    thread.join()
    return made[0]
