"""Which layers of a streamed model take turns of the ring, and which stay in memory for now."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn

from ..disk.ring import Ring
from ..modules.call_values import copy_of
from ..modules.hooks import put, settle, swap, unswap
from .executor import LayerExecutor
from .slot_views import StreamedUnit, Weights
from .transport import Transport


class StreamedLayers:
    """The layers that the units of one ring hold. Changed between passes only.

    Args:
        units: what the ring's units hold: streamed layers and slices of tables, and layers that stay in memory for now.
        order: all of them in the order of a pass.
        resident: the layers (their modules) that stay in memory for now.
        copies: as in ``Weights``.
    """

    def __init__(
        self,
        units: Sequence[StreamedUnit],
        ring: Ring,
        turns: LayerExecutor,
        *,
        order: Sequence[int],
        resident: Sequence[nn.Module],
        copies: bool,
        transport: Transport,
    ) -> None:
        self.units, self.weights = units, Weights(units, ring, copies=copies)
        self._turns, self._transport, self._order = turns, transport, list(order)
        turns.bind(ring, self.weights, self.arrived)
        self._layers: dict[int, list[int]] = {}  # units of each layer, by its module's id
        for i, u in enumerate(units):
            if u.rows is None:
                self._layers.setdefault(id(u.layer.module), []).append(i)
        self._resident = {id(module) for module in resident}
        self._adopting: dict[int, list[mx.array] | None] = {}  # units that come to stay, and their weights
        for key, mine in self._layers.items():
            if key not in self._resident:
                self._install(key)
            else:
                transport.watch(units[mine[0]].layer.module)

    @property
    def order(self) -> list[int]:
        """The units of a pass as they come now."""
        return [i for i in self._order if id(self.units[i].layer.module) not in self._resident]

    def is_resident(self, layer: nn.Module) -> bool:
        """Whether a layer that could be streamed stays in memory now."""
        return id(layer) in self._resident

    @property
    def modules(self) -> list[int]:
        """The ids of the layers' modules as their turns begin."""
        found = [id(self.units[i].layer.module) for i in self.order]
        return [m for i, m in zip(self.order, found, strict=True) if self._layers.get(m, [None])[0] == i]

    def ends(self, unit: int) -> int | None:
        """The id of the layer's module whose turns end with this unit; None: it is none's last."""
        module = id(self.units[unit].layer.module)
        return module if self._layers.get(module, [None])[-1] == unit else None

    def shed(self, layers: Sequence[nn.Module]) -> None:
        """Stream these layers from the next pass on."""
        for module in layers:
            if id(module) in self._resident:
                self._resident.remove(id(module))
                for i in self._layers[id(module)]:
                    settle(self.units[i].layer.parameters, False)
                self._install(id(module))

    def adopt(self, layers: Sequence[nn.Module]) -> None:
        """Keep what the next pass brings of these layers: they stay in memory from the pass after that on."""
        for module in layers:
            self._adopting.update(dict.fromkeys(self._layers[id(module)]))

    def adopt_none(self) -> None:
        """Keep nothing of what the next pass brings, after all. Between passes only."""
        self._adopting = {}

    def is_coming(self, layer: nn.Module) -> bool:
        """Whether the next pass brings a layer to stay."""
        return any(i in self._adopting for i in self._layers.get(id(layer), ()))

    def _install(self, key: int) -> None:
        units = [(i, self.units[i]) for i in self._layers[key]]
        self._transport.unwatch(units[0][1].layer.module)
        for i, u in units:
            self.weights.withdraw(i)
            if not u.modules:
                swap(u.layer.module, "Streamed", self._turns.whole(i))
            for module in u.modules:
                swap(module, "Streamed", self._turns.part(i))
        if units[0][1].modules:
            swap(units[0][1].layer.module, "Streamed", self._turns.in_parts(units[0][0]))

    def keep_adopted(self) -> bool:
        """Layers of which all has come stay in memory. Returns whether any does."""
        if not self._adopting:
            return False
        whole = [k for k, mine in self._layers.items() if all(self._adopting.get(i) is not None for i in mine)]
        for key in whole:
            for i in self._layers[key]:
                u = self.units[i]
                for module in (u.layer.module, *u.modules):
                    unswap(module)
                put(u.layer.parameters, self._adopting.pop(i) or [])
                settle(u.layer.parameters, True)
            self._resident.add(key)
            self._transport.watch(self.units[self._layers[key][0]].layer.module)
        # What did not come in one pass (its order was another) will not be waited for.
        self._adopting = {i: None for i, arrays in self._adopting.items() if arrays is None}
        return bool(whole)

    def arrived(self, unit: int, slot: int) -> None:
        """Copy a unit's weights out of its slot if it comes to stay."""
        if unit in self._adopting:
            arrays = [copy_of(a) for a in self.weights.to_stay(unit, slot)]
            mx.eval(arrays)
            self._adopting[unit] = arrays

    def remove(self) -> None:
        """Give the layers their own classes back (their streamed weights stay absent)."""
        for u in self.units:
            for module in (u.layer.module, *u.modules):
                unswap(module)
