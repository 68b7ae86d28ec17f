"""Runs calls of streamed modules: their weights are in a slot while their work is handed to the device.

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
from ..modules.hooks import Call, caches_in, handles, tokens_in
from .seams import KVOffloader, Stage
from .streamed_layers import StreamedLayers
from .undo import Moved, Undo


class Awaited(Protocol):
    @property
    def ready(self) -> bool: ...
    def wait(self) -> None: ...


# The numbers of the passes whose results the caller needs; None: all of them.
Wanted = Collection[int] | None

# Ranks, and the array that goes to them.
Leaving = list[tuple[tuple[int, ...], mx.array]]


@dataclass
class Recorded:
    """The work of one unit in one pass. A recorded pass has no ``lease`` of the unit's slot yet.

    Attributes:
        unit: None for a resident layer whose outputs other ranks need.
        arrays: everything derived from the unit's weights.
        moved: caches that changed meanwhile, with their arrays.
        arriving, leaving: inputs from and outputs to other ranks.
    """

    unit: int | None
    arrays: list[mx.array]
    moved: Moved = field(default_factory=list)
    arriving: list[Awaited] = field(default_factory=list)
    leaving: Leaving = field(default_factory=list)
    lease: Lease | None = None


@dataclass
class RecordedPass:
    """A forward pass whose graph is built but not evaluated.

    Attributes:
        made: decoded or cast weights by turn; all passes that share a reading use the same dictionary.
        seen: ids of the caches that streamed layers were given.
        tail: arrays of later caches, left by resident layers after the last streamed one.
        moved: caches that changed after the last unit, with their arrays.
        incoming: data from other ranks for the part that is built next.
    """

    made: dict[int, list[mx.array | None]] = field(default_factory=dict)
    units: list[Recorded] = field(default_factory=list)
    seen: set[int] = field(default_factory=set)
    tail: list[mx.array] = field(default_factory=list)
    moved: Moved = field(default_factory=list)
    incoming: list[Awaited] = field(default_factory=list)

    def arriving(self) -> list[Awaited]:
        """Returns and clears the data that other ranks send for what was built since the last call."""
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
    """Yields each unit's work, in order, as a list with an entry per pass.

    Args:
        heads: units that only results are made from; they are skipped for passes whose results are not ``wanted``.
        reached: called with caches that are about to be computed after the last unit.
    """
    if any([r.unit for r in p.units] != [r.unit for r in passes[0].units] for p in passes):
        raise OutcoreError("this model calls its layers in a different order in each pass: run one pass at a time")
    alone = heads if wanted is not None else ()
    kept = [p for n, p in enumerate(passes) if _is(n, wanted)]
    for unwanted in (r for n, p in enumerate(passes) if not _is(n, wanted) for r in p.units if r.unit in alone):
        unwanted.arrays = []
    for turn, first in enumerate(passes[0].units):
        if first.unit in alone:
            # The inputs of resident layers after the last streamed one were recorded with the head.
            for awaited in (a for p in passes for a in p.units[turn].arriving):
                awaited.wait()
            _finish(passes, reached, wanted)
        # The head takes its slot even if no result is wanted, with nothing to compute.
        yield [p.units[turn] for p in (kept or passes[-1:] if first.unit in alone else passes)]
    if wanted is not None:
        _finish(passes, reached, wanted)


def _is(number: int, wanted: Wanted) -> bool:
    return wanted is None or number in wanted


def _finish(passes: Sequence[RecordedPass], reached: Callable[[Moved], None], wanted: Wanted) -> None:
    """Computes what resident layers after the last streamed one leave in their caches, pass by pass to save memory."""
    for number, each in enumerate(passes):
        each.settle()
        reached(each.moved)
        if not _is(number, wanted):
            mx.eval(each.tail)
        each.tail, each.moved = [], []


# Streamed units that may still run on the device when the next one is handed over.
LAG = 1


class LayerExecutor:
    """Handles the calls of streamed modules and tracks their work until the device has done it.

    Args:
        after_unit: functions to call when a unit's work was handed to the device.
        evaluates: the model evaluates arrays inside its forward pass, so weights must have arrived before a graph is
            built.

    Attributes:
        recording: the pass that calls are recorded in; None: calls are executed.
        tokens: the most tokens that a unit was called with since this was set to 0.
        pooled: experts are read one by one, and nothing else goes through the ring.
        undo: restores caches if the pass fails; None: caches are not restored.
        done: called with a unit's lease once the unit is computed, while its slot still holds it.
        ended: time at which the last unit was seen to be done, and the seconds spent waiting for other ranks up to
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
            if self.pooled:
                return self._passed(unit, original(*args, **kwargs))
            if self.kv is not None:
                self._enter(unit, args, kwargs)
            turn = self._begin(unit, args, kwargs)
            try:
                out = original(*args, **kwargs)
            finally:
                self._layers.weights.withdraw(unit)
            turn.arrays = handles(out, args, kwargs)
            if not self._transport.alone:
                turn.leaving = self._transport.leaving(self._layers.module(unit), out)
            if self.recording is not None:
                self.recording.see(args, kwargs)
            self._end(turn)
            return out

        return call

    def part(self, unit: int) -> Call:
        """Returns the call of a module inside of a layer that is streamed in several units."""

        def call(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            if self.pooled:
                return original(*args, **kwargs)
            if self._open is None or self._open.unit != unit:
                self._close_part()
                self._open = self._begin(unit, args, kwargs)
            out = original(*args, **kwargs)
            self._open.arrays += handles(out)
            return out

        return call

    def in_parts(self, unit: int) -> Call:
        """Returns the call of a layer that is streamed in several units, the first of which is ``unit``."""

        def call(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            if self.pooled:
                return self._passed(unit, original(*args, **kwargs))
            try:
                if self.kv is not None:
                    self._enter(unit, args, kwargs)
                out = original(*args, **kwargs)
                if (last := self._open) is not None:
                    # Recorded passes hand caches on: holding them here would keep all versions in memory.
                    last.arrays += handles(out) if self.recording is not None else handles(out, args, kwargs)
                    last.leaving = (
                        [] if self._transport.alone else self._transport.leaving(self._layers.module(unit), out)
                    )
                if self.recording is not None:
                    self.recording.see(args, kwargs)
                self._close_part()
            except BaseException:
                self.abandon()
                raise
            return out

        return call

    def abandon(self) -> None:
        """After a failure: removes the open unit's weights from the model. The ring keeps the leases of the slots."""
        part, self._open, self.recording = self._open, None, None
        if part is not None and part.unit is not None:
            self._layers.weights.withdraw(part.unit)

    def forget(self) -> None:
        """After a failure: waits for what still computes and ignores its errors. The ring keeps the leases of the
        slots."""
        for _, arrays in self._pending:
            with contextlib.suppress(RuntimeError):
                mx.eval(arrays)
        self._pending.clear()

    # The work of a unit

    def _begin(self, unit: int, args: Any, kwargs: Any) -> Recorded:
        """Puts a unit's weights, which may still be on their way, into the model; a recorded pass reserves its slot in
        the order."""
        self.tokens = max(self.tokens, tokens_in(args))
        ring, weights = self._layers.ring, self._layers.weights
        if (within := self.recording) is not None:
            turns = sum(r.unit is not None for r in within.units)
            slot = (ring.next_slot + turns) % len(ring.slots)
            at, turn = len(within.units), Recorded(unit, [], arriving=within.arriving())
            if at not in within.made:
                within.made[at] = weights.made(unit, slot)
            within.units.append(turn)
            weights.put(unit, slot, args, within.made[at])
            return turn
        lease = ring.take(unit)
        if not lease.read.ready:
            # Compute the resident layers before this one, which are in the graph of its inputs, during the read.
            self.settle()
            # Leave caches out, so that their buffers can be reused.
            mx.async_eval([a for a in (*args, *kwargs.values()) if isinstance(a, mx.array)])
        if self._evaluates:
            self.arrive(lease)
        weights.put(unit, lease.slot, args)
        return Recorded(unit, [], lease=lease)

    def _end(self, turn: Recorded) -> None:
        """Hands a unit's finished graph to the device, or records it. The unit's weights must be out of the model."""
        if turn.lease is None:
            turn.arrays += [array for _, array in turn.leaving]
            turn.moved = self.moved()
            return
        self.arrive(turn.lease)
        if turn.lease.unit in self._layers.adopting:
            self._layers.arrived(turn.lease.unit, turn.lease.slot)
        if not turn.leaving:
            self.hand_over(turn.lease, turn.arrays)
            return
        self.hand_over(turn.lease, [*turn.arrays, *(array for _, array in turn.leaving)])
        self._transport.depart(turn.leaving)

    def _close_part(self) -> None:
        part = self._open
        if part is not None and part.unit is not None:
            self._layers.weights.withdraw(part.unit)
            self._end(part)
            self._open = None

    def hand_over(self, lease: Lease, arrays: list[mx.array]) -> None:
        """Has the device compute ``arrays``, everything derived from the lease's slot, and waits for the unit
        before."""
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
        """Waits for a unit's bytes, the inputs from other ranks, and the keys and values that lie on disk."""
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
        if self._transport.alone:
            return
        if self._transport.waits:
            # The other ranks compute meanwhile, so release the slot that was computed from for the next read.
            self.drain()
        self._transport.settle()

    def _passed(self, unit: int, out: Any) -> Any:
        """Sends the outputs of a layer that did not go through the ring to the ranks that need them."""
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
