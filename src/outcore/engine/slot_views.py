"""The weights of streamed units: where they lie in a slot, in their places in the model, and out of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..checkpoint.lazy_model import DTYPES, Decoder
from ..disk.layout import COPY_ROWS, Unit
from ..disk.ring import Ring
from ..modules.call_values import sequences_in, tokens_in
from ..modules.hooks import absent, put
from ..modules.layers import Layer
from ..modules.nested_linear import NestedLinear


@dataclass(frozen=True)
class StreamedUnit:
    """A unit of the ring, and the layer, or the table of which it is a slice, whose parameters it holds.

    Attributes:
        layer: with those of its parameters that the unit holds.
        cast: the dtype that each parameter is computed in, where it differs from the one on disk.
        decoders: of each parameter that is stored in another form than it is used in; none at all: all lie as used.
        modules: the modules inside the layer that the parameters belong to, where the layer is streamed in several
            units; none where the unit serves the layer's whole call.
        rows: of the table that it holds; None for a layer's.
    """

    layer: Layer
    unit: Unit
    cast: tuple[mx.Dtype | None, ...]
    modules: tuple[nn.Module, ...] = ()
    rows: slice | None = None
    decoders: tuple[Decoder | None, ...] = ()


class Weights:
    """Units' parameters as views of the slots that they are read into.

    Args:
        copies: the device has memory of its own, so large products, and those of several sequences, copy their weights
            first, for which memory was planned.
    """

    def __init__(self, units: Sequence[StreamedUnit], ring: Ring, *, copies: bool) -> None:
        self.units = units
        self.ring = ring
        self.copies = copies
        self._views: dict[tuple[int, int], list[mx.array]] = {}
        # Units whose parameters are all used as they lie.
        self._plain = [not u.decoders and all(to is None for to in u.cast) for u in units]
        self._shared: dict[tuple[int, int, str, tuple[int, ...]], mx.array] = {}
        self._absent = [absent([p.array for p in u.layer.parameters]) for u in units]
        # All at once, and now: one by one, each would wait in turn behind what a GPU has queued.
        places = [(n, slot) for n in range(len(units)) for slot in range(len(ring.slots))]
        mx.eval([view for n, slot in places for view in self._bound(n, slot)])

    def of(self, unit: int, slot: int, args: Any = (), made: Sequence[mx.array | None] | None = None) -> list[mx.array]:
        """A unit's parameters as they are in a slot, for a call with ``args``.

        Args:
            made: what ``made`` said of them; None: it is asked.
        """
        copied = self.copies and (tokens_in(args) >= COPY_ROWS or sequences_in(args) > 1)
        made = self.made(unit, slot) if made is None else made
        return [
            m if m is not None else mx.concatenate([v[:1], v[1:]]) if copied and v.shape[0] > 1 else v
            for v, m in zip(self._views[unit, slot], made, strict=True)
        ]

    def made(self, unit: int, slot: int) -> list[mx.array | None]:
        """Those of a unit's parameters that are used in another form or dtype than they are stored in, not evaluated;
        None for each that is used as it lies."""
        u, views = self.units[unit], self._views[unit, slot]
        decoders = u.decoders or [None] * len(views)
        found: list[mx.array | None] = []
        for view, d, to in zip(views, decoders, u.cast, strict=True):
            array = view if d is None else d.decode(view)
            found.append(array.astype(to) if to is not None else array if d is not None else None)
        return found

    def to_stay(self, unit: int, slot: int) -> list[mx.array]:
        """A unit's parameters as they are in a slot, to be copied. Codes of which a draft has the high bits are not put
        together yet: that would be the high bits twice, of all layers that come with one sweep."""
        views = self._views[unit, slot]
        decoders = self.units[unit].decoders or [None] * len(views)
        triples = zip(views, self.made(unit, slot), decoders, strict=True)
        return self.of(unit, slot, (), [view if isinstance(d, NestedLinear) else m for view, m, d in triples])

    def _bound(self, unit: int, slot: int) -> list[mx.array]:
        """A unit's parameters as views of a slot, not evaluated yet."""
        fields = self.units[unit].unit.fields
        views = self._views[unit, slot] = [self._view(slot, f.at, f.dtype, f.shape, f.nbytes) for f in fields]
        return views

    def _view(self, slot: int, at: int, dtype: str, shape: tuple[int, ...], nbytes: int) -> mx.array:
        # Units of like layout share their views: an evaluated view keeps showing what the slot holds.
        key = (slot, at, dtype, shape)
        if key not in self._shared:
            s = self.ring.slots[slot]
            view = s.array[s.base + at : s.base + at + nbytes].view(DTYPES[dtype]).reshape(shape)
            self._shared[key] = view
        return self._shared[key]

    def put(self, unit: int, slot: int, args: Any, made: Sequence[mx.array | None] | None = None) -> None:
        """Put a unit's parameters in their places in the model."""
        plain = self._plain[unit] and not self.copies
        put(self.units[unit].layer.parameters, self._views[unit, slot] if plain else self.of(unit, slot, args, made))

    def withdraw(self, unit: int) -> None:
        """Take them out again: any use of them fails from then on."""
        put(self.units[unit].layer.parameters, self._absent[unit])

    def close(self) -> None:
        """Let go of the slots."""
        self._views.clear()
        self._shared.clear()
