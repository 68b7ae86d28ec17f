"""Runs the calls of streamed modules, whose weights are in a slot only until the device has computed with them.

A layer's call builds its graph on views of a slot, waits for the read, hands the graph to the device and only then
waits for the streamed layer *before* it, whose slot it releases. So the device always has the next layer queued. Before
a slot is reused, everything derived from it is evaluated: the layer's outputs, its caches, and whatever it wrote into
its arguments.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import mlx.core as mx

from ..disk.metrics import Metrics
from ..disk.ring import Lease
from ..errors import OutcoreError
from ..machine.allocator import note_held
from ..modules.hooks import Call, caches_in, handles, put, tokens_in
from .seams import ExpertCaches, KVOffloader, Stage
from .streamed_layers import StreamedLayers
from .undo import Moved, Undo


class Awaited(Protocol):
    @property
    def ready(self) -> bool: ...
    def wait(self) -> None: ...


# The numbers of the passes whose results the caller needs; None: all of them.
Wanted = Collection[int] | None

# Arrays to send to other ranks: the numbers of these ranks, and the array.
Leaving = list[tuple[tuple[int, ...], mx.array]]


@dataclass
class Recorded:
    """The work of one unit in one pass.

    Attributes:
        unit: its number; None: a resident layer whose outputs other ranks need, or a copy of another rank's layer.
        arrays: everything derived from the unit's weights; ``weights``: these, until it ends.
        moved: caches that the unit's call changed, with their new arrays.
        arriving, leaving: inputs from other ranks, outputs to other ranks.
        lease: of the unit's slot; None: the pass is only recorded so far, and its slot is taken later.
    """

    unit: int | None
    arrays: list[mx.array]
    moved: Moved = field(default_factory=list)
    arriving: list[Awaited] = field(default_factory=list)
    leaving: Leaving = field(default_factory=list)
    lease: Lease | None = None
    weights: list[mx.array] = field(default_factory=list)


@dataclass
class RecordedPass:
    """A forward pass whose graph is built but not evaluated.

    Attributes:
        made: decoded or cast weights by index in ``units``; shared by all passes that share a reading.
        seen: ids of the caches that streamed layers were called with.
        tail: arrays of the caches that resident layers after the last streamed one write to.
        moved: caches that changed after the last unit, with their new arrays.
        incoming: inputs from other ranks that the next unit's work needs.
    """

    made: dict[int, list[mx.array | None]] = field(default_factory=dict)
    units: list[Recorded] = field(default_factory=list)
    seen: set[int] = field(default_factory=set)
    tail: list[mx.array] = field(default_factory=list)
    moved: Moved = field(default_factory=list)
    incoming: list[Awaited] = field(default_factory=list)

    def arriving(self) -> list[Awaited]:
        """Returns ``incoming`` and clears it."""
        found, self.incoming = self.incoming, []
        return found

    def settle(self) -> None:
        for each in self.arriving():
            each.wait()

    def see(self, *values: Any) -> None:
        self.seen.update(map(id, caches_in(*values)))

    def end(self, *values: Any) -> None:
        caches = caches_in(*values)
        last = max((i for i, c in enumerate(caches) if id(c) in self.seen), default=-1)
        self.tail += handles(caches[last + 1 :])


def in_turn(
    passes: Sequence[RecordedPass], heads: Collection[int], reached: Callable[[Moved], None], wanted: Wanted
) -> Iterator[list[Recorded]]:
    """Yields, for each unit in the order of a pass, a list of its work in each of the passes.

    Args:
        heads: units of a streamed head; left out for passes whose results are not ``wanted``.
        reached: called with the caches of layers after the last streamed one, before they are computed.
    """
    if any([r.unit for r in p.units] != [r.unit for r in passes[0].units] for p in passes):
        raise OutcoreError("this model calls its layers in a different order in each pass: run one pass at a time")
    alone = heads if wanted is not None else ()
    kept = [p for n, p in enumerate(passes) if _is_wanted(n, wanted)]
    for work in (r for n, p in enumerate(passes) if not _is_wanted(n, wanted) for r in p.units if r.unit in alone):
        work.arrays = []
    for turn, first in enumerate(passes[0].units):
        if first.unit in alone:
            # The inputs of resident layers after the last streamed one were recorded with the head.
            for awaited in (a for p in passes for a in p.units[turn].arriving):
                awaited.wait()
            _finish(passes, reached, wanted)
        # If no result is wanted, one pass without arrays still takes the head's slot, to keep the ring's order.
        yield [p.units[turn] for p in (kept or passes[-1:] if first.unit in alone else passes)]
    if wanted is not None:
        _finish(passes, reached, wanted)


def _is_wanted(number: int, wanted: Wanted) -> bool:
    return wanted is None or number in wanted


def _finish(passes: Sequence[RecordedPass], reached: Callable[[Moved], None], wanted: Wanted) -> None:
    """Finishes each pass after its last streamed layer: waits for other ranks, and evaluates the caches of resident
    layers there unless the result is ``wanted`` (the caller evaluates it)."""
    for number, each in enumerate(passes):
        each.settle()
        reached(each.moved)
        if not _is_wanted(number, wanted):
            mx.eval(each.tail)
        each.tail, each.moved = [], []


# How many units may still run on the device after the next one was handed over.
LAG = 1


class LayerExecutor:
    """Handles the calls of streamed modules and releases their slots once the device has computed them.

    Args:
        after_unit: functions to call each time that a unit's work was handed to the device.
        evaluates: the model evaluates arrays inside its forward pass, so weights must have arrived before a graph is
            built.

    Attributes:
        recording: the pass that calls are recorded in; None: calls are executed.
        tokens: the most tokens of any unit's call in this pass.
        experts: expert caches; None: there are none.
        pooled: this pass takes experts from the expert caches, and units of experts do not go through the ring.
        undo: restores caches if the pass fails; None: caches are not restored.
        done: called with a unit's lease once the unit is computed, while its weights are still in the slot.
        ended: time when the last unit was found to be computed, and the seconds spent waiting for other ranks until
            then.
    """

    def __init__(
        self,
        metrics: Metrics,
        after_unit: list[Callable[[], object]],
        *,
        evaluates: bool,
        transport: Stage,
    ) -> None:
        self.recording: RecordedPass | None = None
        self.tokens = 0
        self.pooled = False
        self.undo: Undo | None = None
        self.kv: KVOffloader | None = None
        self.experts: ExpertCaches | None = None
        self.done: Callable[[Lease], object] | None = None
        self.ended = 0.0, 0.0
        self._metrics, self._after_unit = metrics, after_unit
        self._evaluates, self._transport = evaluates, transport
        self._pending: deque[tuple[Lease, list[mx.array]]] = deque()  # oldest first
        self._open: Recorded | None = None  # unit of a layer whose modules are being called

    def bind(self, layers: StreamedLayers) -> None:
        self._layers = layers

    # Calls

    def whole(self, unit: int) -> Call:
        def call(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            if self.pooled and self._layers.units[unit].experts:
                return self._passed(unit, original(*args, **kwargs))
            if self.kv is not None:
                self._enter(unit, args, kwargs)
            turn = self._begin(unit, args, kwargs)
            out = self._run(turn, unit, original, args, kwargs)
            turn.arrays = handles(out, args, kwargs)
            if not self._transport.alone:
                turn.leaving = self._transport.leaving(self._layers.module(unit), out)
            if self.recording is not None:
                self.recording.see(args, kwargs)
            self._end(turn)
            return out

        return call

    def part(self, unit: int) -> Call:
        """Returns the replacement for the call of a module inside a layer that is streamed in several units."""

        def call(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            if self.pooled and self._layers.units[unit].experts:
                return original(*args, **kwargs)
            if self._open is None or self._open.unit != unit:
                self.close_part()
                self._open = self._begin(unit, args, kwargs)
            out = self._run(self._open, unit, original, args, kwargs)
            self._open.arrays += handles(out, caches_in(args, kwargs))  # a cache may keep what no output needs yet
            return out

        return call

    def in_parts(self, unit: int) -> Call:
        """Returns the replacement for the call of a layer that is streamed in several units; ``unit`` is the first."""

        def call(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            try:
                if self.kv is not None:
                    self._enter(unit, args, kwargs)
                out = original(*args, **kwargs)
                if (last := self._open) is not None:
                    # The next recorded pass goes on with these caches: listing them here would keep all versions.
                    last.arrays += handles(out) if self.recording is not None else handles(out, args, kwargs)
                    if not self._transport.alone:
                        last.leaving = self._transport.leaving(self._layers.module(unit), out)
                if self.recording is not None:
                    self.recording.see(args, kwargs)
                self.close_part()
                if last is None:
                    return self._passed(unit, out)
            except BaseException:
                self.abandon()
                raise
            return out

        return call

    def abandon(self) -> None:
        """Ends the open unit after a failure. Only ``Ring.abandon`` frees slots."""
        self._open = self.recording = None

    def forget(self) -> None:
        """Waits after a failure until the device has finished, and ignores its errors. Only ``Ring.abandon`` frees
        slots."""
        for _, arrays in self._pending:
            with contextlib.suppress(RuntimeError):
                mx.eval(arrays)
        self._pending.clear()

    # The work of a unit

    def _begin(self, unit: int, args: Any, kwargs: Any) -> Recorded:
        """Takes views of a unit's slot as its weights, perhaps before these were read. A recorded pass takes no slot:
        it computes from the ring's order which slot the unit will have."""
        self.tokens = max(self.tokens, tokens_in(args))
        ring, weights = self._layers.ring, self._layers.weights
        if (within := self.recording) is not None:
            turns = sum(r.unit is not None for r in within.units)
            slot = (ring.next_slot + turns) % len(ring.slots)
            at, turn = len(within.units), Recorded(unit, [], arriving=within.arriving())
            if at not in within.made:
                within.made[at] = weights.made(unit, slot)
            within.units.append(turn)
            views = weights.views[unit, slot]
            turn.weights = views if weights.plain[unit] else weights.of(unit, slot, args, within.made[at])
            return turn
        if self.pooled and self.experts is not None and self.experts.pending:
            # What follows depends on experts that have to be read first; meanwhile the ring may read, too.
            self.drain()
            self.experts.settle()
        lease = ring.take(unit)
        if not lease.read.ready:
            # Compute the resident layers before this one, which are in the graph of its inputs, during the read.
            if not self._transport.alone:
                self.settle()
            # MLX leaves caches out, so that their buffers can be reused.
            mx.async_eval(args, kwargs)
        if self._evaluates:
            self.arrive(lease)
        views = weights.views[unit, lease.slot] if weights.plain[unit] else weights.of(unit, lease.slot, args)
        return Recorded(unit, [], lease=lease, weights=views)

    def _run(self, turn: Recorded, unit: int, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs a call with its weights in the model; only then, as in a trace: other uses would not be evaluated."""
        put(self._layers.units[unit].layer.parameters, turn.weights)
        try:
            return original(*args, **kwargs)
        finally:
            self._layers.weights.withdraw(unit)

    def _end(self, turn: Recorded) -> None:
        """Hands a unit's finished graph to the device, or records it."""
        turn.weights = []
        if turn.lease is None:
            turn.arrays += [array for _, array in turn.leaving]
            turn.moved = self.moved()
            return
        self.arrive(turn.lease)
        if not turn.leaving:
            self.hand_over(turn.lease, turn.arrays)
            return
        self.hand_over(turn.lease, [*turn.arrays, *(array for _, array in turn.leaving)])
        self._transport.depart(turn.leaving)

    def close_part(self) -> None:
        """Hands the open unit's work to the device, so that what is derived from it may be evaluated."""
        if (part := self._open) is not None and part.unit is not None:
            self._end(part)
            self._open = None

    def hand_over(self, lease: Lease, arrays: list[mx.array]) -> None:
        """Queues ``arrays``, which are everything derived from the lease's slot, on the device. Then waits for the
        unit before."""
        if lease.unit in self._layers.adopting:
            self._layers.arrived(lease.unit, lease.slot)
        if self.undo is not None:
            self.undo.reached(self.undo.moved())
        self._pending.append((lease, arrays))
        with self._transport.working():
            mx.async_eval(arrays)
        note_held()
        for call in self._after_unit:
            call()
        self.drain(LAG)

    def drain(self, lag: int = 0) -> None:
        """Waits for all units handed over except the last ``lag``, and releases their slots for prefetching."""
        while len(self._pending) > lag:
            lease, arrays = self._pending[0]
            with self._transport.working():
                mx.eval(arrays)
            note_held()
            self._pending.popleft()
            self.ended = self._metrics.clock(), self._metrics.ranks_s
            if self.done is not None:
                self.done(lease)
            self._layers.ring.release(lease)

    def arrive(self, lease: Lease) -> None:
        """Waits for a unit's bytes, its inputs from other ranks, and its keys and values on disk."""
        if lease.read.ready:
            lease.read.wait()
        else:
            # The thread waits for the disk anyway, so release the slot that is being computed from for the next read.
            self.drain()
            self._layers.ring.wait(lease)
        if not self._transport.alone:
            self.settle()
        if self.kv is not None:
            self.kv.arrive(self._layers.module(lease.unit))

    def _enter(self, unit: int, args: Any, kwargs: Any) -> None:
        assert self.kv is not None
        self.kv.enter(self._layers.module(unit), caches_in(args, kwargs), self.recording is not None)

    # Other ranks

    def settle(self) -> None:
        if self._transport.waits:
            # The thread waits anyway, so release the slot that is being computed from for the next read.
            self.drain()
        self._transport.settle()

    def _passed(self, unit: int, out: Any) -> Any:
        """Sends the outputs of a layer, whose pass does not use the ring, to the ranks that need them."""
        if not self._transport.alone and (leaving := self._transport.leaving(self._layers.module(unit), out)):
            self.reached(self.moved())
            self._transport.depart(leaving)
        return out

    # Undo

    def moved(self) -> Moved:
        return [] if self.undo is None else self.undo.moved()

    def reached(self, moved: Moved) -> None:
        if self.undo is not None:
            self.undo.reached(moved)
