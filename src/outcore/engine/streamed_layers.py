"""Which layers are streamed or resident at the moment, and where streamed weights lie in slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn

from ..checkpoint.lazy_model import DTYPES, Decoder
from ..disk.layout import COPY_ROWS, SlotField, Unit
from ..disk.ring import Ring
from ..modules.call_values import copy_of, sequences_in, tokens_in
from ..modules.hooks import absent, put, settle, swap, unswap
from ..modules.layers import Layer

if TYPE_CHECKING:
    from .executor import LayerExecutor
    from .seams import Stage
    from .vocabulary import StreamedTable


@dataclass(frozen=True)
class StreamedUnit:
    """A unit of the ring, with the layer (or sliced table) whose parameters it holds.

    Attributes:
        cast: dtype that each parameter is computed in; None: as stored.
        decoders: decoder of each parameter; None: it is stored as used. Empty: all are.
        modules: if the layer is streamed in several units, the modules inside it that own the parameters.
        rows: of the table that it holds; None for a layer's.
    """

    layer: Layer
    unit: Unit
    cast: tuple[mx.Dtype | None, ...]
    modules: tuple[nn.Module, ...] = ()
    rows: slice | None = None
    decoders: tuple[Decoder | None, ...] = ()


@dataclass(frozen=True)
class Binding:
    """A plan's assignment of units to a ring: streamed layers, slices of tables, and ``resident`` layers that may be
    shed."""

    ring: Ring
    units: Sequence[StreamedUnit]
    order: Sequence[int]
    resident: Sequence[nn.Module]
    tables: Sequence[StreamedTable]


class Weights:
    """Units' parameters as views of slots. ``copies``: the device has its own memory, and large products, or those of
    several sequences, first copy their weights there."""

    def __init__(self, units: Sequence[StreamedUnit], ring: Ring, *, copies: bool) -> None:
        self.units = units
        self.ring = ring
        self.copies = copies
        # Whether a unit's parameters are all used as stored.
        self._plain = [all(each is None for each in (*u.decoders, *u.cast)) for u in units]
        self._shared: dict[tuple[int, int, str, tuple[int, ...]], mx.array] = {}
        self._absent = [absent([p.array for p in u.layer.parameters]) for u in units]
        # Evaluate all of them now: later, each would wait behind the queued work of a GPU.
        places = [(n, slot) for n in range(len(units)) for slot in range(len(ring.slots))]
        self._views = {(n, slot): [self._view(slot, f) for f in units[n].unit.fields] for n, slot in places}
        mx.eval(list(self._views.values()))

    def of(self, unit: int, slot: int, args: Any = (), made: Sequence[mx.array | None] | None = None) -> list[mx.array]:
        """Returns a unit's parameters in a slot for a call with ``args``; ``made`` is the result of ``self.made``, if
        known."""
        copied = self.copies and (tokens_in(args) >= COPY_ROWS or sequences_in(args) > 1)
        made = self.made(unit, slot) if made is None else made
        return [
            m if m is not None else mx.concatenate([v[:1], v[1:]]) if copied and v.shape[0] > 1 else v
            for v, m in zip(self._views[unit, slot], made, strict=True)
        ]

    def made(self, unit: int, slot: int) -> list[mx.array | None]:
        """Returns the unevaluated decoded or cast form of each parameter; None for each that is used as stored."""
        u, views = self.units[unit], self._views[unit, slot]
        decoders = u.decoders or [None] * len(views)
        found: list[mx.array | None] = []
        for view, d, to in zip(views, decoders, u.cast, strict=True):
            array = view if d is None else d.decode(view)
            found.append(array.astype(to) if to is not None else array if d is not None else None)
        return found

    def to_stay(self, unit: int, slot: int) -> list[mx.array]:
        """Returns a unit's parameters in a slot, to be copied.

        Codes whose high bits a draft holds are not joined yet: that would hold the high bits twice, for all layers of a
        pass.
        """
        views = self._views[unit, slot]
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

    def put(self, unit: int, slot: int, args: Any, made: Sequence[mx.array | None] | None = None) -> None:
        """Puts a unit's parameters into the model."""
        plain = self._plain[unit] and not self.copies
        put(self.units[unit].layer.parameters, self._views[unit, slot] if plain else self.of(unit, slot, args, made))

    def withdraw(self, unit: int) -> None:
        """Removes a unit's parameters from the model: any use of them fails from then on."""
        put(self.units[unit].layer.parameters, self._absent[unit])

    def close(self) -> None:
        self._views.clear()
        self._shared.clear()


class StreamedLayers:
    """The layers in the units of one ring. ``adopting`` maps units that become resident with this pass to their
    weights, once these have arrived."""

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
        return [i for i in self._order if self.module(i) not in self._resident]

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
        """Makes layers that have arrived completely resident. Returns whether there were any."""
        if not self.adopting:
            return False
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
        # Do not wait for units that this pass did not bring, as its order was different.
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
