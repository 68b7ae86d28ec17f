"""A unit's turn: its weights are in a slot while what is called with them is handed to the device.

A layer's call builds its graph on views of the slot that its turn will have, waits for the read, hands the graph to
the device and only then waits for the streamed layer *before* it, whose slot is given back: the device always has
the next layer queued. What is evaluated before a slot is reused is everything derived from it: the layer's outputs,
the caches it was given, and whatever it wrote into its arguments.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from ..disk.metrics import Metrics
from ..disk.ring import Lease
from ..machine.allocator import note_held
from ..modules.call_values import caches_in, handles, tokens_in
from ..modules.hooks import Call
from .recorded_pass import Recorded, RecordedPass
from .seams import KVOffloader, Stage
from .streamed_layers import StreamedLayers
from .undo import Moved, Undo

LAG = 1
"""Streamed units that may be under way on the device when the next is handed over."""


class LayerExecutor:
    """What calls of streamed modules go through, and the units' work on the device that is not known to be done.

    Args:
        after_unit: called, in order, when a unit's work was handed to the device.
        evaluates: the model evaluates arrays inside its forward pass, so weights must be there before a graph is.
        transport: to the ranks that have other layers of the model.

    Attributes:
        recording: the pass that calls are recorded in; None: they take turns.
        tokens: the most that a unit was called with since this was set to 0.
        pooled: experts are read one by one, and nothing takes a turn.
        undo: what takes caches back if the sweep breaks off; None: nobody would miss them.
        beside: keeps keys and values elsewhere; None: nobody does.
        done: called with a unit's lease when it is computed, and its slot still holds it.
        ended: when the last unit was seen to be done, by the clock of ``metrics`` (0 before the first), and the seconds
            for which other ranks had been waited for by then.
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
        self._open: Recorded | None = None  # the part of a layer whose modules are called now, one after the other

    def bind(self, layers: StreamedLayers) -> None:
        """Turns are those of these layers' ring from now on, while nothing is under way."""
        self._layers = layers

    # Calls

    def whole(self, unit: int) -> Call:
        """The call of a module that one unit serves."""

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
        """The call of one of the modules that a unit serves, inside of a layer's ``in_parts``."""

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
        """The call of a layer that is streamed in several units, one of which is ``unit``."""

        def call(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            if self.pooled:
                return self._passed(unit, original(*args, **kwargs))
            try:
                if self.kv is not None:
                    self._enter(unit, args, kwargs)
                out = original(*args, **kwargs)
                if (last := self._open) is not None:
                    # Of several passes each has its caches from the one before: held here, all of them would be there.
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
        """After something failed: no weights are left in their places. The ring keeps the slots' leases."""
        part, self._open, self.recording = self._open, None, None
        if part is not None and part.unit is not None:
            self._layers.weights.withdraw(part.unit)

    def forget(self) -> None:
        """After something failed: wait for what still computes, whatever becomes of it. The ring keeps the slots."""
        for _, arrays in self._pending:
            with contextlib.suppress(RuntimeError):
                mx.eval(arrays)
        self._pending.clear()

    # A unit's turn

    def _begin(self, unit: int, args: Any, kwargs: Any) -> Recorded:
        """Put a unit's weights in place, which may still be on their way. Where passes are recorded its place in the
        order is taken now."""
        self.tokens = max(self.tokens, tokens_in(args))
        ring, weights = self._layers.ring, self._layers.weights
        if (within := self.recording) is not None:
            slot = (ring.next_slot + within.turns) % len(ring.slots)
            at, turn = len(within.units), Recorded(unit, [], arriving=within.arriving())
            if at not in within.made:
                within.made[at] = weights.made(unit, slot)
            within.units.append(turn)
            weights.put(unit, slot, args, within.made[at])
            return turn
        lease = ring.take(unit)
        if not lease.read.ready:
            # Resident layers since the last streamed one are in the inputs' graph and on no queue yet.
            self.settle()
            # What caches hold is left out, so that their buffers can be reused.
            mx.async_eval([a for a in (*args, *kwargs.values()) if isinstance(a, mx.array)])
        if self._evaluates:
            self.arrive(lease)
        weights.put(unit, lease.slot, args)
        return Recorded(unit, [], lease=lease)

    def _end(self, turn: Recorded) -> None:
        """All of a unit's graph is built, and its weights are out of their places: hand it over, or note it."""
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
        """Have the device compute ``arrays``: all that is derived from the lease's slot. Wait for the unit before."""
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
        """Wait for all that was handed to the device but the last ``lag`` units, and give the slots back for reading
        ahead."""
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

    def all_done(self) -> None:
        """What was handed over is done by now."""
        self.ended = self._metrics.clock(), self._metrics.ranks_s

    def arrive(self, lease: Lease) -> None:
        """Wait for a unit's bytes, and for what goes with them."""
        if lease.read.ready:
            lease.read.wait()
        else:
            # Waiting for the disk anyway: the slot that is being computed from may as well be read into next.
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
        """Wait for what other ranks send, where passes are not recorded."""
        if self._transport.alone:
            return
        if self._transport.waits:
            # Others compute meanwhile: the slot that was computed from may as well be read into next.
            self.drain()
        self._transport.settle()

    def _passed(self, unit: int, out: Any) -> Any:
        """What a layer put out that took no turn."""
        if not self._transport.alone and (leaving := self._transport.leaving(self._layers.module(unit), out)):
            self.reached(self.moved())
            self._transport.depart(leaving)
        return out

    # What it takes to go back

    def moved(self) -> Moved:
        """Caches that have moved on since this was asked last, and what they hold."""
        return [] if self.undo is None else self.undo.moved()

    def reached(self, moved: Moved) -> None:
        """These caches are about to be computed."""
        if self.undo is not None:
            self.undo.reached(moved)
