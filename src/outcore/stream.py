"""Streaming installed on a loaded model: each streamed layer reads its weights from the ring while it is called.

A layer's call builds its graph on views of the slot that its turn will have, waits for the read, hands the graph to
the device and only then waits for the streamed layer *before* it, whose slot is given back: the device always has
the next layer queued. What is evaluated before a slot is reused is everything derived from it: the layer's outputs,
the caches it was given, and whatever it wrote into its arguments.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .errors import OutcoreError
from .handles import caches_in, copy_of, handles, inputs_of, sequences_in, tokens_in
from .layers import Layer
from .layout import COPY_ROWS, Unit
from .metrics import Metrics
from .modules import Call, absent, put, swap, unswap
from .origins import DTYPES
from .ring import Lease, Ring
from .tables import Lookup, with_rows_of_bias

LAG = 1
"""Streamed layers that may be under way on the device when the next is handed over."""


@dataclass(frozen=True)
class StreamedUnit:
    """A unit of the ring, and the layer, or the table of which it is a slice, whose parameters it holds.

    Attributes:
        layer: with those of its parameters that the unit holds.
        cast: the dtype that each parameter is computed in, where it differs from the one on disk.
        modules: the modules inside the layer that the parameters belong to, where the layer is streamed in several
            units; none where the unit serves the layer's whole call.
        rows: of the table that it holds; None for a layer's.
    """

    layer: Layer
    unit: Unit
    cast: tuple[mx.Dtype | None, ...]
    modules: tuple[nn.Module, ...] = ()
    rows: slice | None = None


@dataclass(frozen=True)
class StreamedTable:
    """A table that is not in memory.

    Attributes:
        rows: for each of its slices, the unit of the ring and the rows that it holds; empty where it is not multiplied
            with.
        lookup: reads rows; None where it is not looked up in.
    """

    table: Layer
    rows: tuple[tuple[int, slice], ...]
    lookup: Lookup | None


@dataclass
class _Recorded:
    unit: int
    arrays: list[mx.array]


@dataclass
class _Tail:
    """What a recorded pass leaves behind after its streamed layers.

    Attributes:
        seen: caches that streamed layers were given, by id.
        arrays: of the caches after those.
    """

    seen: set[int] = field(default_factory=set)
    arrays: list[mx.array] = field(default_factory=list)


@dataclass
class _Open:
    """The part of a layer whose weights are in place while its modules are called, one after the other."""

    unit: int
    lease: Lease | None  # None while passes are recorded
    arrays: list[mx.array]


class Streaming:
    """The engine behind a streamed model; ``model.outcore`` gives access to it.

    Args:
        units: what the ring's units hold: streamed layers and slices of tables, and layers that stay in memory for now.
        order: all of them in the order of a sweep.
        resident: the layers (their modules) that stay in memory for now; see ``shed``.
        tables: embeddings and heads that are not in memory.
        copies: the device has memory of its own, so large products, and those of several sequences, copy their weights
            first, for which memory was planned.
        evaluates: the model evaluates arrays inside its forward pass, so weights must be there before a graph is.

    Attributes:
        on_unit: called after each streamed layer, for progress.
        on_sweep: called before each sweep, when nothing of the one before is under way: the time to ``shed``.
        on_part: called after each unit, in the middle of a sweep.
        sweep_s: seconds of the last sweep, from its beginning until its last unit was computed; None before the first.
        sweep_tokens: tokens that the sweep now under way, or the last one, was for.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[StreamedUnit],
        ring: Ring,
        *,
        order: Sequence[int],
        resident: Sequence[nn.Module] = (),
        tables: Sequence[StreamedTable] = (),
        metrics: Metrics,
        copies: bool = False,
        evaluates: bool = False,
    ) -> None:
        self.model = model
        self.metrics = metrics
        self.copies = copies
        self.evaluates = evaluates
        self.on_unit: Callable[[], None] | None = None
        self.on_sweep: Callable[[], None] | None = None
        self.on_part: Callable[[], None] | None = None
        self.sweep_s: float | None = None
        self.sweep_tokens = 0
        self._began = 0.0
        self._pending: deque[tuple[Lease, list[mx.array], float]] = deque()
        self._settled = 0.0  # when the unit before was seen to be done
        self._recording: list[_Recorded] | None = None
        self._tail = _Tail()
        self._open: _Open | None = None
        self.bind(units, ring, order=order, resident=resident, tables=tables)

    def bind(
        self,
        units: Sequence[StreamedUnit],
        ring: Ring,
        *,
        order: Sequence[int],
        resident: Sequence[nn.Module] = (),
        tables: Sequence[StreamedTable] = (),
    ) -> None:
        """Stream the model through this ring; arguments as above. Where there was another: after ``release``."""
        self.units = units
        self.tables = tables
        self.ring = ring
        self._order = list(order)
        self._layers: dict[int, list[int]] = {}  # units of each layer, by its module's id
        for i, u in enumerate(units):
            if u.rows is None:
                self._layers.setdefault(id(u.layer.module), []).append(i)
        self._resident = {id(module) for module in resident}
        self._adopting: dict[int, list[mx.array] | None] = {}  # units that come to stay, and their weights
        self._views: dict[tuple[int, int], list[mx.array]] = {}
        self._shared: dict[tuple[int, int, str, tuple[int, ...]], mx.array] = {}
        self._absent = [absent([p.array for p in u.layer.parameters]) for u in units]
        for key in self._layers:
            if key not in self._resident:
                self._install(key)
        for t in tables:
            put(t.table.parameters, absent([p.array for p in t.table.parameters]))
            swap(t.table.module, "Streamed", *self._calls(t))
        swap(self.model, "Streamed", self._forward)

    def release(self) -> None:
        """Between sweeps: free slots, threads and files, so that the model can be bound to another ring."""
        self.close()
        self.remove()

    # What is streamed

    @property
    def order(self) -> list[int]:
        """The units of a sweep as they come now."""
        return [i for i in self._order if id(self.units[i].layer.module) not in self._resident]

    def is_resident(self, layer: nn.Module) -> bool:
        """Whether a layer that could be streamed stays in memory now."""
        return id(layer) in self._resident

    def shed(self, layers: Sequence[nn.Module]) -> None:
        """Stream these layers from the next sweep on, and free the memory that they stayed in. Between sweeps only."""
        self.settle()
        for module in layers:
            if id(module) in self._resident:
                self._resident.remove(id(module))
                self._install(id(module))
        self.ring.reorder(self.order)
        mx.clear_cache()

    def adopt(self, layers: Sequence[nn.Module]) -> None:
        """Keep what the next sweep brings of these layers: they stay in memory from the sweep after that on."""
        for module in layers:
            self._adopting.update(dict.fromkeys(self._layers[id(module)]))

    def _install(self, key: int) -> None:
        units = [(i, self.units[i]) for i in self._layers[key]]
        for i, u in units:
            put(u.layer.parameters, self._absent[i])
            if not u.modules:
                swap(u.layer.module, "Streamed", self._enter(i))
            for module in u.modules:
                swap(module, "Streamed", self._enter_part(i))
        if units[0][1].modules:
            swap(units[0][1].layer.module, "Streamed", self._in_parts)

    def _keep_adopted(self) -> None:
        """Layers of which all has come stay in memory."""
        whole = [k for k, mine in self._layers.items() if all(self._adopting.get(i) is not None for i in mine)]
        for key in whole:
            for i in self._layers[key]:
                u = self.units[i]
                for module in (u.layer.module, *u.modules):
                    unswap(module)
                put(u.layer.parameters, self._adopting.pop(i) or [])
            self._resident.add(key)
        # What did not come in one sweep (its order was another) will not be waited for.
        self._adopting = {i: None for i, arrays in self._adopting.items() if arrays is None}
        if whole:
            self.ring.reorder(self.order)

    def _adopt(self, unit: int, slot: int) -> None:
        """Copy a unit's weights out of its slot if it comes to stay."""
        if unit in self._adopting:
            arrays = [copy_of(a) for a in self._weights(unit, slot, ())]
            mx.eval(arrays)
            self._adopting[unit] = arrays

    # The model's calls

    def _forward(self, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._recording is None:
            self._begin_sweep()
            return original(*args, **kwargs)
        out = original(*args, **kwargs)
        caches = caches_in(args, kwargs)
        last = max((i for i, c in enumerate(caches) if id(c) in self._tail.seen), default=-1)
        self._tail.arrays += handles(caches[last + 1 :])
        return out

    def _enter(self, unit: int) -> Callable[..., Any]:
        def call(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            if self._recording is not None:
                return self._record(unit, original, args, kwargs)
            return self._compute(unit, original, args, kwargs)

        return call

    def _enter_part(self, unit: int) -> Call:
        def call(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            if self._open is None or self._open.unit != unit:
                self._close_part()
                self._open_part(unit, args, kwargs)
            assert self._open is not None
            out = original(*args, **kwargs)
            self._open.arrays += handles(out)
            return out

        return call

    def _in_parts(self, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The call of a layer that is streamed in several units."""
        try:
            out = original(*args, **kwargs)
            if self._open is not None:
                # Of several passes each has its caches from the one before: held here, all of them would be there.
                self._open.arrays += handles(out, args, kwargs) if self._recording is None else handles(out)
            self._tail.seen.update(map(id, caches_in(args, kwargs)))
            self._close_part()
            return out
        except BaseException:
            part, self._open = self._open, None
            if part is not None:
                put(self.units[part.unit].layer.parameters, self._absent[part.unit])
                if part.lease is not None:
                    self.ring.release(part.lease)
            raise

    def _open_part(self, unit: int, args: Any, kwargs: Any) -> None:
        """Put a part's weights in place, which may still be on their way."""
        if self._recording is not None:
            lease, slot = None, (self.ring.next_slot + len(self._recording)) % len(self.ring.slots)
            # Its place in the order is taken now; what it computes is known when it is closed.
            self._recording.append(_Recorded(unit, []))
        else:
            lease = self.ring.take(unit)
            slot = lease.slot
        self._open = _Open(unit, lease, [])
        if lease is not None and not lease.read.ready:
            mx.async_eval(inputs_of(args, kwargs))
        if lease is not None and self.evaluates:
            self._arrive(lease)
        put(self.units[unit].layer.parameters, self._weights(unit, slot, args))

    def _close_part(self) -> None:
        part = self._open
        if part is None:
            return
        put(self.units[part.unit].layer.parameters, self._absent[part.unit])
        if part.lease is None:
            assert self._recording is not None
            self._recording[-1].arrays = part.arrays
            self._open = None
            return
        self._arrive(part.lease)
        self._adopt(part.unit, part.lease.slot)
        self._open = None
        self._hand_over(part.lease, part.arrays)
        self._lag()

    def _calls(self, table: StreamedTable) -> tuple[Call, Call | None]:
        """What a table's call goes through, and its ``as_linear``."""
        if not isinstance(table.table.module, nn.Embedding | nn.QuantizedEmbedding):
            return self._multiply(table), None
        return self._look_up(table), self._multiply(table)

    def _multiply(self, table: StreamedTable) -> Call:
        def call(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            parts = [
                self._enter(unit)(with_rows_of_bias(original, table.table.module, rows), args, kwargs)
                for unit, rows in table.rows
            ]
            return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)

        return call

    def _look_up(self, table: StreamedTable) -> Call:
        def call(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            assert table.lookup is not None
            parameters = table.table.parameters
            before = [p.array for p in parameters]
            arrays, ids = table.lookup(args[0])
            put(parameters, arrays)
            try:
                return original(ids, *args[1:], **kwargs)
            finally:
                put(parameters, before)

        return call

    def _begin_sweep(self) -> None:
        self.settle()
        if self._began:
            self.sweep_s = self._settled - self._began
        if self._adopting:
            self._keep_adopted()
        if self.on_sweep is not None:
            self.on_sweep()
        self.ring.begin_sweep()
        self.metrics.sweeps += 1
        self._began, self.sweep_tokens = self.metrics.clock(), 0

    def _compute(self, unit: int, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        lease = self.ring.take(unit)
        try:
            if not lease.read.ready:
                # Resident layers since the last streamed one are in the inputs' graph and on no queue yet.
                mx.async_eval(inputs_of(args, kwargs))
            if self.evaluates:
                self._arrive(lease)
            out = self._build(unit, lease.slot, original, args, kwargs)
            self._arrive(lease)
            self._adopt(unit, lease.slot)
        except BaseException:
            self.ring.release(lease)
            raise
        self._hand_over(lease, handles(out, args, kwargs))
        self._lag()
        return out

    def _build(self, unit: int, slot: int, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        parameters = self.units[unit].layer.parameters
        put(parameters, self._weights(unit, slot, args))
        try:
            return original(*args, **kwargs)
        finally:
            put(parameters, self._absent[unit])

    # Slots and the device

    def _arrive(self, lease: Lease) -> None:
        """Wait for the unit's bytes to be in its slot."""
        if not lease.read.ready:
            # Waiting for the disk anyway: the slot that is being computed from may as well be read into next.
            self.settle()
        self.ring.wait(lease)

    def _hand_over(self, lease: Lease, arrays: list[mx.array]) -> None:
        self._pending.append((lease, arrays, self.metrics.clock()))
        mx.async_eval(arrays)
        if self.on_unit is not None:
            self.on_unit()
        if self.on_part is not None:
            self.on_part()

    def _lag(self) -> None:
        while len(self._pending) > LAG:
            self._settle_one()

    def _settle_one(self) -> None:
        lease, arrays, handed = self._pending[0]
        mx.eval(arrays)
        self._pending.popleft()
        self.metrics.note("compute", self.units[lease.unit].unit.name, max(handed, self._settled))
        self._settled = self.metrics.clock()
        self.ring.release(lease)

    def settle(self) -> None:
        """Wait for all that was handed to the device, and give its slots back for reading ahead."""
        while self._pending:
            self._settle_one()

    def _weights(self, unit: int, slot: int, args: Any) -> list[mx.array]:
        self.sweep_tokens = max(self.sweep_tokens, tokens_in(args))
        views = self._views.get((unit, slot))
        if views is None:
            views = self._views[unit, slot] = [
                self._view(slot, f.at, f.dtype, f.shape, f.nbytes) for f in self.units[unit].unit.fields
            ]
        if self.copies and (tokens_in(args) >= COPY_ROWS or sequences_in(args) > 1):
            views = [mx.concatenate([v[:1], v[1:]]) if v.shape[0] > 1 else v for v in views]
        cast = self.units[unit].cast
        return [v if to is None else v.astype(to) for v, to in zip(views, cast, strict=True)]

    def _view(self, slot: int, at: int, dtype: str, shape: tuple[int, ...], nbytes: int) -> mx.array:
        # Units of like layout share their views: an evaluated view keeps showing what the slot holds.
        key = (slot, at, dtype, shape)
        if key not in self._shared:
            s = self.ring.slots[slot]
            view = s.array[s.base + at : s.base + at + nbytes].view(DTYPES[dtype]).reshape(shape)
            mx.eval(view)
            self._shared[key] = view
        return self._shared[key]

    # Several passes in one sweep

    def sweep(self, passes: Sequence[Callable[[], mx.array]], *, last_only: bool = False) -> list[mx.array]:
        """Run forward passes one after the other in a single sweep: each unit's weights serve all of them.

        The graphs of all passes are built first, so each sees the caches as the passes before it leave them; then
        they are evaluated unit by unit. The results equal those of separate sweeps bit for bit. The model must not
        evaluate anything inside its forward pass.

        Args:
            last_only: only the last pass's result is wanted, so a streamed head is computed for that one alone.

        Returns:
            What each pass returned, not necessarily evaluated; with ``last_only`` a list of one.
        """
        self._begin_sweep()
        recorded: list[list[_Recorded]] = []
        tails: list[_Tail] = []
        outputs: list[mx.array] = []
        try:
            for run in passes:
                self._recording, self._tail = [], _Tail()
                # A result that nobody wants would hold what it is made from, caches above all.
                outputs = [run()] if last_only else [*outputs, run()]
                recorded.append(self._recording)
                tails.append(self._tail)
        finally:
            self._recording, self._tail = None, _Tail()
        if any([r.unit for r in calls] != [r.unit for r in recorded[0]] for calls in recorded):
            raise OutcoreError("this model runs its layers in another order from pass to pass; use one pass a sweep")
        heads = {unit for t in self.tables for unit, _ in t.rows} if last_only else set()
        for call in (call for calls in recorded[:-1] for call in calls if call.unit in heads):
            call.arrays = []
        for turn, first in enumerate(recorded[0]):
            if first.unit in heads:
                self._finish(tails)
            wanted = recorded[-1:] if first.unit in heads else recorded
            self._evaluate([calls[turn] for calls in wanted])
        if last_only:
            self._finish(tails)
        return outputs

    def _finish(self, tails: list[_Tail]) -> None:
        """Compute what resident layers after the last streamed one leave in their caches, pass by pass: with the last
        pass's logits alone all of it would be under way at once."""
        for tail in tails[:-1]:
            mx.eval(tail.arrays)
            tail.arrays = []
        tails.clear()

    def _record(self, unit: int, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        assert self._recording is not None
        slot = (self.ring.next_slot + len(self._recording)) % len(self.ring.slots)
        out = self._build(unit, slot, original, args, kwargs)
        self._recording.append(_Recorded(unit, handles(out, args, kwargs)))
        self._tail.seen.update(map(id, caches_in(args, kwargs)))
        return out

    def _evaluate(self, passes: list[_Recorded]) -> None:
        lease = self.ring.take(passes[0].unit)
        try:
            self._arrive(lease)
        except BaseException:
            self.ring.release(lease)
            raise
        for recorded in passes[:-1]:
            # One at a time: MLX allocates when work is queued, and a pass's activations are freed only after it.
            mx.eval(recorded.arrays)
            recorded.arrays = []
        self._hand_over(lease, passes[-1].arrays)
        passes[-1].arrays = []
        self._lag()

    def close(self) -> None:
        """Free slots, threads and files. The model cannot be called afterwards. Safe to call twice."""
        try:
            self.settle()
        finally:
            for t in self.tables:
                if t.lookup is not None:
                    t.lookup.close()
            self._pending.clear()
            self._views.clear()
            self._shared.clear()
            self.ring.close()

    def remove(self) -> None:
        """Give the model its own classes back (its streamed weights stay absent)."""
        for u in self.units:
            for module in (u.layer.module, *u.modules):
                unswap(module)
        for t in self.tables:
            unswap(t.table.module)
        unswap(self.model)
