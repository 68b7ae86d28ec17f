"""A unit's turn: its weights are in a slot while what is called with them is handed to the device.

A layer's call builds its graph on views of the slot that its turn will have, waits for the read, hands the graph to
the device and only then waits for the streamed layer *before* it, whose slot is given back: the device always has
the next layer queued. What is evaluated before a slot is reused is everything derived from it: the layer's outputs,
the caches it was given, and whatever it wrote into its arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx

from ..disk.ring import Lease, Ring
from ..modules.call_values import caches_in, handles, inputs_of, tokens_in
from ..modules.hooks import Call
from .in_flight import InFlightQueue
from .recorded_pass import Leaving, Recorded, RecordedPass
from .slot_views import Weights
from .transport import Transport
from .undo import Moved, Undo


class KVOffloader(Protocol):
    """What layers need in their turns beside weights. They are told of by their modules' ids; others are passed by."""

    def expect(self, modules: Sequence[int]) -> None:
        """Between sweeps: these layers will be called, in this order."""

    def adopt(self, caches: Sequence[Any]) -> None:
        """Between sweeps: these caches of the whole model will be used."""

    def begin_sweep(self) -> None:
        """Nothing is under way."""

    def enter(self, module: int, caches: Sequence[Any], building: bool) -> None:
        """A layer is about to be called; ``building``: only its graph is built for now."""

    def arrive(self, module: int) -> None:
        """Wait for what it needs to be there."""

    def computed(self, module: int) -> None:
        """All of the layer was computed."""

    def abandon(self) -> None:
        """A sweep broke off."""

    def close(self) -> None:
        """Free all that is held. Safe to call twice."""


@dataclass
class _OpenPart:
    """The part of a layer whose weights are in place while its modules are called, one after the other."""

    unit: int
    lease: Lease | None  # None while passes are recorded
    arrays: list[mx.array]


class LayerExecutor:
    """What calls of streamed modules go through.

    Args:
        handed_over: called when a unit's work was handed to the device.
        evaluates: the model evaluates arrays inside its forward pass, so weights must be there before a graph is.
        transport: to the ranks that have other layers of the model.

    Attributes:
        recording: the pass that calls are recorded in; None: they take turns.
        tokens: the most that a unit was called with since this was set to 0.
        pooled: calls go to pools of experts, and nothing takes a turn.
        undo: what takes caches back if the sweep breaks off; None: nobody would miss them.
        beside: what goes with the turns; None: nothing.
    """

    def __init__(
        self,
        under_way: InFlightQueue,
        *,
        handed_over: Callable[[], None],
        evaluates: bool,
        transport: Transport,
    ) -> None:
        self.recording: RecordedPass | None = None
        self.tokens = 0
        self.pooled = False
        self.undo: Undo | None = None
        self.beside: KVOffloader | None = None
        self._under_way = under_way
        self._handed_over = handed_over
        self._evaluates = evaluates
        self._transport, self._alone = transport, transport.alone
        self._open: _OpenPart | None = None

    def bind(self, ring: Ring, weights: Weights, arrived: Callable[[int, int], None]) -> None:
        """Turns are this ring's from now on; ``arrived`` is called with a unit and its slot when its weights are
        there."""
        self._ring = self._under_way.ring = ring
        self._weights, self._arrived = weights, arrived

    # A unit for one call

    def whole(self, unit: int) -> Call:
        """The call of a module that one unit serves."""

        def call(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            if self.pooled:
                return self._passed(unit, original(*args, **kwargs))
            if self.recording is not None:
                return self._record(self.recording, unit, original, args, kwargs)
            return self._compute(unit, original, args, kwargs)

        return call

    def _compute(self, unit: int, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        lease = self._ring.take(unit)
        if not lease.read.ready:
            # Resident layers since the last streamed one are in the inputs' graph and on no queue yet.
            self.settle()
            mx.async_eval(inputs_of(args, kwargs))
        if self._evaluates:
            self._under_way.arrive(lease)
        if self.beside is not None:
            self._enter(unit, args, kwargs)
        out = self._build(unit, lease.slot, original, args, kwargs)
        leaving = [] if self._alone else self._leaving(unit, out)
        self._arrive(lease)
        self._arrived(unit, lease.slot)
        self._hand_over(lease, [*handles(out, args, kwargs), *[array for _, array in leaving]])
        if leaving:
            self._transport.depart(leaving)
        return out

    def _record(self, within: RecordedPass, unit: int, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self._enter(unit, args, kwargs)
        out = self._build(unit, self._next_slot(within), original, args, kwargs)
        leaving = self._leaving(unit, out)
        arrays = [*handles(out, args, kwargs), *(array for _, array in leaving)]
        within.units.append(Recorded(unit, arrays, self.moved(), within.arriving(), leaving))
        within.see(args, kwargs)
        return out

    def _build(self, unit: int, slot: int, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self._put(unit, slot, args, 0 if self.recording is None else len(self.recording.units))
        try:
            return original(*args, **kwargs)
        finally:
            self._weights.withdraw(unit)

    # A unit for some of the modules in a layer

    def part(self, unit: int) -> Call:
        """The call of one of the modules that a unit serves, inside of a layer's ``in_parts``."""

        def call(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            if self.pooled:
                return original(*args, **kwargs)
            if self._open is None or self._open.unit != unit:
                self._close_part()
                self._open_part(unit, args, kwargs)
            assert self._open is not None
            out = original(*args, **kwargs)
            self._open.arrays += handles(out)
            return out

        return call

    def in_parts(self, unit: int) -> Call:
        """The call of a layer that is streamed in several units, one of which is ``unit``."""

        def call(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            return self._in_parts(unit, original, args, kwargs)

        return call

    def _in_parts(self, unit: int, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self.pooled:
            return self._passed(unit, original(*args, **kwargs))
        try:
            self._enter(unit, args, kwargs)
            out = original(*args, **kwargs)
            leaving = self._leaving(unit, out)
            if self._open is not None:
                self._open.arrays += [array for _, array in leaving]
                # Of several passes each has its caches from the one before: held here, all of them would be there.
                self._open.arrays += handles(out, args, kwargs) if self.recording is None else handles(out)
            if self.recording is not None:
                self.recording.see(args, kwargs)
            self._close_part()
            if self.recording is not None:
                self.recording.units[-1].leaving = leaving
            else:
                self._transport.depart(leaving)
            return out
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """After something failed: no weights are left in their places. The ring keeps the slots' leases."""
        part, self._open, self.recording = self._open, None, None
        if part is not None:
            self._weights.withdraw(part.unit)

    def _open_part(self, unit: int, args: Any, kwargs: Any) -> None:
        """Put a part's weights in place, which may still be on their way."""
        if self.recording is not None:
            lease, slot = None, self._next_slot(self.recording)
            # Its place in the order is taken now; what it computes is known when it is closed.
            self.recording.units.append(Recorded(unit, [], arriving=self.recording.arriving()))
        else:
            lease = self._ring.take(unit)
            slot = lease.slot
        self._open = _OpenPart(unit, lease, [])
        if lease is not None and not lease.read.ready:
            self.settle()
            mx.async_eval(inputs_of(args, kwargs))
        if lease is not None and self._evaluates:
            self._under_way.arrive(lease)
        self._put(unit, slot, args, 0 if self.recording is None else len(self.recording.units) - 1)

    def _close_part(self) -> None:
        part = self._open
        if part is None:
            return
        self._weights.withdraw(part.unit)
        if part.lease is None:
            assert self.recording is not None
            self.recording.units[-1].arrays = part.arrays
            self.recording.units[-1].moved = self.moved()
            self._open = None
            return
        self._arrive(part.lease)
        self._arrived(part.unit, part.lease.slot)
        self._open = None
        self._hand_over(part.lease, part.arrays)

    # A unit for several passes

    def evaluate(self, passes: list[Recorded]) -> None:
        """Compute what passes recorded of one unit, or of a layer in memory whose outputs go to other ranks, in its
        turn."""
        unit = passes[0].unit
        lease = None if unit is None else self._ring.take(unit)
        if lease is not None:
            self._arrive(lease)
        for recorded in passes:
            if not all(each.ready for each in recorded.arriving):
                self._under_way.drain()
            for each in recorded.arriving:
                each.wait()
            self.reached(recorded.moved)
            recorded.moved = []
            if recorded is passes[-1]:
                break
            # One at a time: MLX allocates when work is queued, and a pass's activations are freed only after it.
            with self._transport.working():
                mx.eval(recorded.arrays)
            self._under_way.drain()  # the unit before is computed too, and its slot may be read into
            recorded.arrays = []
            self._transport.depart(recorded.leaving)
            recorded.leaving = []
        arrays, passes[-1].arrays = passes[-1].arrays, []
        if lease is not None:
            self._hand_over(lease, arrays)
        else:
            with self._transport.working():
                mx.eval(arrays)
            self._handed_over()
        self._transport.depart(passes[-1].leaving)
        passes[-1].leaving = []

    def _enter(self, unit: int, args: Any, kwargs: Any) -> None:
        if self.beside is not None:
            self.beside.enter(self._module(unit), caches_in(args, kwargs), self.recording is not None)

    def _arrive(self, lease: Lease) -> None:
        """Wait for a unit's bytes, and for what goes with them."""
        self._under_way.arrive(lease)
        if not self._alone:
            self.settle()
        if self.beside is not None:
            self.beside.arrive(self._module(lease.unit))

    def settle(self) -> None:
        """Wait for what other ranks send, where passes are not recorded."""
        if self._alone:
            return
        if self._transport.waits:
            # Others compute meanwhile: the slot that was computed from may as well be read into next.
            self._under_way.drain()
        self._transport.settle()

    def _leaving(self, unit: int, out: Any) -> Leaving:
        """What of a layer's outputs goes to other ranks."""
        return self._transport.leaving(self._module(unit), out)

    def _passed(self, unit: int, out: Any) -> Any:
        """What a layer put out that took no turn."""
        leaving = self._leaving(unit, out)
        if leaving:
            self.reached(self.moved())
            self._transport.depart(leaving)
        return out

    def _module(self, unit: int) -> int:
        return id(self._weights.units[unit].layer.module)

    def _next_slot(self, within: RecordedPass) -> int:
        return (self._ring.next_slot + within.turns) % len(self._ring.slots)

    def _put(self, unit: int, slot: int, args: Any, turn: int) -> None:
        """``turn``: which one of the pass it is, while passes are recorded."""
        self.tokens = max(self.tokens, tokens_in(args))
        made = None
        if self.recording is not None and (made := self.recording.made.get(turn)) is None:
            made = self.recording.made[turn] = self._weights.made(unit, slot)
        self._weights.put(unit, slot, args, made)

    # What it takes to go back

    def moved(self) -> Moved:
        """Caches that have moved on since this was asked last, and what they hold."""
        return [] if self.undo is None else self.undo.moved()

    def reached(self, moved: Moved) -> None:
        """These caches are about to be computed."""
        if self.undo is not None:
            self.undo.reached(moved)

    def _hand_over(self, lease: Lease, arrays: list[mx.array]) -> None:
        if self.undo is not None:
            self.undo.reached(self.undo.moved())
        self._under_way.hand_over(lease, arrays)
        self._handed_over()
        self._under_way.lag()
