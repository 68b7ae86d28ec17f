"""Tracks which layers are streamed or resident at the moment, and makes streamed weights as views of slots.

A table is an embedding or a head. Of an embedding that is not in memory, a token's row is read from disk. A head that
is not in memory is streamed in slices of its rows, like layers, since output rows do not depend on each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..checkpoint.checkpoint import TensorInfo
from ..checkpoint.lazy_model import DTYPES, Decoder
from ..disk.layout import COPY_ROWS, SlotField, Unit
from ..disk.reader import RowReader
from ..disk.ring import Ring
from ..modules.hooks import Call, absent, copy_of, put, sequences_in, settle, swap, tokens_in, unswap
from ..modules.layers import Layer

if TYPE_CHECKING:
    from .executor import LayerExecutor
    from .seams import Stage


# Slices begin at multiples of this many rows, so that kernels compute every row by the same loop as in one product.
SLICE_STEP = 512


@dataclass(frozen=True)
class Table:
    """An embedding or a head, and its location on disk.

    Attributes:
        layer: its module and parameters (weight, and scales and biases if quantized), rows first.
        places: location of each parameter on disk.
        casts: dtype that each parameter is computed in; None: as stored.
        looked_up: a pass looks up rows in it; ``rows``: how many for each token.
        multiplied: a pass multiplies by it, in slices if it is streamed.
        head: it is multiplied by after all layers, so only results depend on it. (Layers depend on other tables, such
            as projections of embeddings in gemma3n.)
    """

    layer: Layer
    places: tuple[TensorInfo, ...]
    casts: tuple[mx.Dtype | None, ...]
    looked_up: bool
    multiplied: bool
    head: bool
    rows: int = 1

    @property
    def row_bytes(self) -> int:
        return sum(info.nbytes // info.shape[0] for info in self.places)


@dataclass(frozen=True)
class StreamedTable:
    """A table that is not in memory.

    Attributes:
        rows: unit number and rows of each slice; empty: this rank does not multiply by the table.
        reader: reads the rows that are looked up; None: none are.
    """

    table: Table
    rows: tuple[tuple[int, slice], ...]
    reader: RowReader | None

    @property
    def module(self) -> nn.Module:
        return self.table.layer.module

    def asked(self, ids: mx.array) -> tuple[list[int], mx.array]:
        """Returns the rows of ``ids``, each once, and the indices of ``ids`` into them. Evaluates ``ids``; those below
        0 count from the end, as in MLX."""
        rows = self.table.places[0].shape[0]
        asked = np.array(ids).astype(np.int64)
        asked = np.where(asked < 0, asked + rows, asked).clip(0, rows - 1)
        unique, places = np.unique(asked, return_inverse=True)
        return unique.tolist(), mx.array(places.reshape(asked.shape).astype(np.int32))

    def rows_of(self, ids: mx.array) -> tuple[list[mx.array], mx.array]:
        """Reads the rows of ``ids``. Returns the parameters with these rows only, and the indices into them."""
        assert self.reader is not None
        (unique, places), rows = self.asked(ids), self.table.places[0].shape[0]
        arrays = []
        for info, cast in zip(self.table.places, self.table.casts, strict=True):
            data = self.reader.read(info.file, info.offset, info.nbytes // rows, unique, self.table.layer.path)
            array = mx.array(data).view(DTYPES[info.dtype]).reshape(len(unique), *info.shape[1:])
            arrays.append(array if cast is None else array.astype(cast))
        return arrays, places

    def calls(self, enter: Callable[[int], Call]) -> tuple[Call, Call | None]:
        """Returns replacements for the table's call and its ``as_linear`` (None: not needed); ``enter`` returns the
        call of a unit."""

        def multiply(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            if not self.rows:  # only the first rank has the head's slices
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
    """Returns zeros that take no memory, as logits of a rank that samples no tokens; ``rows``: vocabulary size."""
    return mx.broadcast_to(mx.zeros((1,), dtype=x.dtype), (*x.shape[:-1], rows))


@dataclass(frozen=True)
class StreamedUnit:
    """A unit of the ring, and the layer or table whose parameters it holds.

    Attributes:
        cast: dtype that each parameter is computed in; None: as stored.
        decoders: decoder of each parameter; None: it is stored as used. Empty: all are stored as used.
        modules: if the layer is streamed in several units, the modules inside it that own the parameters.
        rows: the rows of the table that the unit holds; None: it holds a layer or a part of one.
        experts: it holds nothing but experts.
    """

    layer: Layer
    unit: Unit
    cast: tuple[mx.Dtype | None, ...]
    modules: tuple[nn.Module, ...] = ()
    rows: slice | None = None
    decoders: tuple[Decoder | None, ...] = ()
    experts: bool = False


@dataclass(frozen=True)
class Binding:
    """A ring, and the units that may go through it. ``order``: unit numbers in the order of a pass; ``resident``:
    modules of the layers in memory; ``tables``: tables that are not in memory."""

    ring: Ring
    units: Sequence[StreamedUnit]
    order: Sequence[int]
    resident: Sequence[nn.Module]
    tables: Sequence[StreamedTable]


class Weights:
    """Units' parameters as views of slots. ``copies``: the device has its own memory, and calls with many tokens or
    several sequences copy their weights there first.

    Attributes:
        plain: whether a unit's parameters are all used as they lie in a slot.
        views: by unit and slot, its parameters there as they are stored; ``absent``: by unit, arrays that stand for
            parameters that are not there: any use of them fails.
    """

    def __init__(self, units: Sequence[StreamedUnit], ring: Ring, *, copies: bool) -> None:
        self.units = units
        self.ring = ring
        self.copies = copies
        self.plain = [not copies and all(each is None for each in (*u.decoders, *u.cast)) for u in units]
        self._shared: dict[tuple[int, int, str, tuple[int, ...]], mx.array] = {}
        self.absent = [absent([p.array for p in u.layer.parameters]) for u in units]
        # Evaluate all views now: later, each would wait behind the queued work of a GPU.
        places = [(n, slot) for n in range(len(units)) for slot in range(len(ring.slots))]
        self.views = {(n, slot): [self._view(slot, f) for f in units[n].unit.fields] for n, slot in places}
        mx.eval(list(self.views.values()))

    def of(self, unit: int, slot: int, args: Any = (), made: Sequence[mx.array | None] | None = None) -> list[mx.array]:
        """Returns a unit's parameters in a slot for a call with ``args``. ``made``: what ``self.made`` returned; None:
        it is called here."""
        copied = self.copies and (tokens_in(args) >= COPY_ROWS or sequences_in(args) > 1)
        made = self.made(unit, slot) if made is None else made
        return [
            m if m is not None else mx.concatenate([v[:1], v[1:]]) if copied and v.shape[0] > 1 else v
            for v, m in zip(self.views[unit, slot], made, strict=True)
        ]

    def made(self, unit: int, slot: int) -> list[mx.array | None]:
        """Returns the unevaluated decoded or cast form of each parameter; None for each that is used as stored."""
        u, views = self.units[unit], self.views[unit, slot]
        decoders = u.decoders or [None] * len(views)
        found: list[mx.array | None] = []
        for view, d, to in zip(views, decoders, u.cast, strict=True):
            array = view if d is None else d.decode(view)
            found.append(array.astype(to) if to is not None else array if d is not None else None)
        return found

    def to_stay(self, unit: int, slot: int) -> list[mx.array]:
        """Returns a unit's parameters in a slot, for copies that become resident.

        Codes whose high bits a draft holds are not joined with them yet: during a pass, the high bits of all layers
        would be in memory twice.
        """
        views = self.views[unit, slot]
        decoders = self.units[unit].decoders or [None] * len(views)
        triples = zip(views, self.made(unit, slot), decoders, strict=True)
        return self.of(unit, slot, (), [view if isinstance(d, nn.Module) else m for view, m, d in triples])

    def _view(self, slot: int, f: SlotField) -> mx.array:
        # Units with the same layout share views: an evaluated view shows whatever the slot holds.
        key = (slot, f.at, f.dtype, f.shape)
        if key not in self._shared:
            s = self.ring.slots[slot]
            view = s.array[s.base + f.at : s.base + f.at + f.nbytes]
            self._shared[key] = view.view(DTYPES[f.dtype]).reshape(f.shape)
        return self._shared[key]

    def withdraw(self, unit: int) -> None:
        """Removes a unit's parameters from the model: any use of them fails from then on."""
        put(self.units[unit].layer.parameters, self.absent[unit])

    def close(self) -> None:
        self.views.clear()
        self._shared.clear()


class StreamedLayers:
    """The layers that one ring has units for. ``adopting``: the units that become resident after this pass, each with a
    copy of its weights; None: not read yet."""

    def __init__(self, bound: Binding, executor: LayerExecutor, copies: bool, transport: Stage) -> None:
        self.ring, self.units = bound.ring, bound.units
        self.weights = Weights(bound.units, bound.ring, copies=copies)
        self._executor, self._transport, self._order = executor, transport, list(bound.order)
        executor.bind(self)
        self._layers: dict[int, list[int]] = {}  # units of each layer, by its module's id
        for i, u in enumerate(self.units):
            if u.rows is None:
                self._layers.setdefault(id(u.layer.module), []).append(i)
        self._resident = {id(module) for module in bound.resident}
        self.adopting: dict[int, list[mx.array] | None] = {}
        for key, mine in self._layers.items():
            if key not in self._resident:
                self._install(key)
            else:
                transport.watch(self.units[mine[0]].layer.module)

    @property
    def order(self) -> list[int]:
        aside = self._executor.pooled  # this pass leaves units of experts out
        resident, units = self._resident, self.units
        return [i for i in self._order if self.module(i) not in resident and not (aside and units[i].experts)]

    def is_resident(self, layer: nn.Module) -> bool:
        return id(layer) in self._resident

    @property
    def modules(self) -> list[int]:
        """Ids of the streamed layers' modules in the order of their first units."""
        return [m for i in self.order if self._layers.get(m := self.module(i), [None])[0] == i]

    def module(self, unit: int) -> int:
        return id(self.units[unit].layer.module)

    def ends(self, unit: int) -> int | None:
        """Returns the id of the layer's module if this unit is its last; otherwise None."""
        module = self.module(unit)
        return module if self._layers.get(module, [None])[-1] == unit else None

    def shed(self, layers: Sequence[nn.Module]) -> None:
        for module in layers:
            if id(module) in self._resident:
                self._resident.remove(id(module))
                for i in self._layers[id(module)]:
                    settle(self.units[i].layer.parameters, False)
                self._install(id(module))

    def adopt(self, layers: Sequence[nn.Module]) -> None:
        """Makes these layers, and no others, resident once the next pass has read them."""
        self.adopting = {i: None for module in layers for i in self._layers[id(module)]}

    def is_coming(self, layer: nn.Module) -> bool:
        return any(i in self.adopting for i in self._layers.get(id(layer), ()))

    def _install(self, key: int) -> None:
        units = [(i, self.units[i]) for i in self._layers[key]]
        self._transport.unwatch(units[0][1].layer.module)
        for i, u in units:
            self.weights.withdraw(i)
            if not u.modules:
                swap(u.layer.module, "Streamed", self._executor.whole(i))
            for module in u.modules:
                swap(module, "Streamed", self._executor.part(i))
        if units[0][1].modules:
            swap(units[0][1].layer.module, "Streamed", self._executor.in_parts(units[0][0]))

    def keep_adopted(self) -> bool:
        """Makes layers resident whose units have all been copied. Returns whether there were any."""
        whole = [k for k, mine in self._layers.items() if all(self.adopting.get(i) is not None for i in mine)]
        for key in whole:
            for i in self._layers[key]:
                u = self.units[i]
                for module in (u.layer.module, *u.modules):
                    unswap(module)
                put(u.layer.parameters, self.adopting.pop(i) or [])
                settle(u.layer.parameters, True)
            self._resident.add(key)
            self._transport.watch(self.units[self._layers[key][0]].layer.module)
        # Drop copies of layers that this pass read only in part, as its order was different.
        self.adopting = {i: None for i, arrays in self.adopting.items() if arrays is None}
        return bool(whole)

    def arrived(self, unit: int, slot: int) -> None:
        arrays = [copy_of(a) for a in self.weights.to_stay(unit, slot)]
        mx.eval(arrays)
        self.adopting[unit] = arrays

    def remove(self) -> None:
        """Restores the layers' own classes. Their streamed weights stay absent."""
        for u in self.units:
            for module in (u.layer.module, *u.modules):
                unswap(module)
