"""Streaming installed on a loaded model: calls of what is streamed take turns of the ring, and sweeps are begun."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import BatchKVCache, BatchRotatingKVCache

from ..disk.metrics import Metrics
from ..disk.ring import Lease
from ..machine.allocator import clear_cache
from ..machine.interrupts import check
from ..modules.call_values import caches_in, handles
from ..modules.hooks import absent, put, swap, unswap
from .executor import LayerExecutor
from .seams import ExpertCaches, KVOffloader, Stage
from .streamed_layers import Binding, StreamedLayers
from .undo import Undo

BATCHED = {BatchKVCache, BatchRotatingKVCache}
"""Caches of a batch that is no more if a pass fails (``mlx_lm.generate.BatchGenerator``)."""


class Streaming:
    """The engine behind a streamed model; ``model.outcore`` gives access to it.

    Args:
        bound: what is streamed through which ring.
        copies: as in ``Weights``.
        evaluates: as in ``LayerExecutor``.
        exclusive: who may compute with the model.
        transport: to the ranks that have other layers of the model.

    Attributes:
        experts: reads experts one by one; ``beside``: keeps keys and values elsewhere; None: nobody does. See ``join``.
        after_unit: who is called when a unit was handed over, in the middle of a sweep.
        before_sweep: and before each sweep, when nothing of the one before is under way: the time to ``shed``.
        sweep_s: seconds of the last sweep, from its beginning until its last unit was computed; None before the first.
    """

    def __init__(
        self,
        model: nn.Module,
        bound: Binding,
        *,
        metrics: Metrics,
        copies: bool,
        evaluates: bool,
        exclusive: AbstractContextManager[object],
        transport: Stage,
    ) -> None:
        self.model, self.metrics, self.exclusive = model, metrics, exclusive
        self.evaluates, self._copies, self._transport = evaluates, copies, transport
        self.after_unit: list[Callable[[], object]] = [check]
        self.before_sweep: list[Callable[[], object]] = []
        self.experts: ExpertCaches | None = None
        self.beside: KVOffloader | None = None
        self.sweep_s: float | None = None
        self._began: tuple[float, float] | None = None  # when the sweep did, and seconds that ranks were waited for
        self._within = False  # a transaction
        self._several = False  # passes of one sweep
        self._turns = LayerExecutor(metrics, self.after_unit, evaluates=evaluates, transport=transport)
        transport.attach(self._turns, lambda: None if self.experts is None else self.experts.settle())
        self.bind(bound)

    # Between sweeps

    def bind(self, bound: Binding) -> None:
        """Stream the model through this ring. Where there was another: after ``release``."""
        self.tables, self.ring = bound.tables, bound.ring
        self.layers = StreamedLayers(bound, self._turns, self._copies, self._transport)
        for t in self.tables:
            unswap(t.module)  # on another rank than the first, it had no head
            put(t.table.layer.parameters, absent([p.array for p in t.table.layer.parameters]))
            swap(t.module, "Streamed", *t.calls(self._turns.whole))
        if self.experts is not None:
            self.experts.bind(self.ring, bound.units)
        swap(self.model, "Streamed", self._forward, whole_model=True)
        self._tell_order()

    def release(self) -> None:
        """Free slots, threads and files, so that the model can be bound to another ring, and give the model its own
        classes back (its streamed weights stay absent)."""
        with self.exclusive:
            if self.beside is not None:
                self.drain()
            self._let_go()
        self.layers.remove()
        for t in self.tables:
            unswap(t.module)
        unswap(self.model)

    def join(self, experts: ExpertCaches | None, beside: KVOffloader | None) -> None:
        """What goes with the layers' turns from now on. What was there before is for its owner to close."""
        self.drain()
        if experts is not None:
            experts.bind(self.ring, self.layers.units)
        self.experts, self.beside, self._turns.beside = experts, beside, beside
        self._turns.done = None if experts is None and beside is None else self._done
        self._tell_order()

    def shed(self, layers: Sequence[nn.Module]) -> None:
        """Stream these layers from the next sweep on, and free the memory that they stayed in."""
        self.drain()
        self.layers.shed(layers)
        self.ring.reorder(self.layers.order)
        self._tell_order()
        clear_cache()

    def _tell_order(self) -> None:
        if self.beside is not None:
            self.beside.expect(self.layers.modules)

    def _done(self, lease: Lease) -> None:
        if self.experts is not None:
            self.experts.done(lease)
        if self.beside is not None and (module := self.layers.ends(lease.unit)) is not None:
            self.beside.computed(module)

    def close(self) -> None:
        """Free slots, threads and files. The model cannot be called afterwards. Safe to call twice."""
        with self.exclusive:
            self._let_go()
            for each in (self.experts, self.beside):
                if each is not None:
                    each.close()
            self.experts = None

    def _let_go(self) -> None:
        """Of the ring and what goes with it."""
        self._turns.forget()
        for t in self.tables:
            if t.reader is not None:
                t.reader.close()
        self.layers.weights.close()
        self.ring.close()

    # Sweeps

    @property
    def sweep_tokens(self) -> int:
        """Tokens that the sweep now under way, or the last one, is for."""
        return self._turns.tokens

    def _forward(self, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A sweep of one pass, or one of several passes of a sweep."""
        if self._several:
            out = original(*args, **kwargs)
            if (recording := self._turns.recording) is not None:
                recording.end(args, kwargs)
                recording.moved = self._turns.moved()
            return out
        caches = caches_in(args, kwargs)
        if not BATCHED.isdisjoint(map(type, caches)):
            caches = []
        ids = None
        for arg in args:
            if isinstance(arg, mx.array) and arg.ndim > 1:
                ids = arg
                break
        with self.exclusive, self.transaction(caches, 2 if ids is None else ids.shape[1]):
            self._begin_sweep(None if ids is None else ids.size)
            out = original(*args, **kwargs)
            self._turns.settle()
            self._end_sweep()
            if ids is not None and ids.shape[1] == 1:
                # Give the last unit's slot back while what follows it is computed: the head, and layers that stay in
                # memory. Of one token all of that is wanted.
                mx.async_eval(handles(out))
                self.drain()
        return out

    @contextmanager
    def transaction(self, cache: list[Any] | None, tokens: int) -> Iterator[Undo | None]:
        """What fails inside leaves the ring whole and these caches as they were.

        Inside of another one, that one's caches count.

        Args:
            cache: None where nobody could go on with them.
            tokens: that are computed.

        Yields:
            what takes the caches back, also later, as long as no further sweep began.
        """
        if self._within:
            yield None
            return
        self._within = True
        undo = None
        try:
            if self.beside is not None:
                # What is not known to be done is not put away yet.
                self.drain()
                if cache:
                    self.beside.adopt(cache)
            undo = self._turns.undo = Undo(cache, tokens) if cache else None
            yield undo
        except BaseException:
            self._turns.abandon()
            self._transport.abandon()
            if self.experts is not None:
                self.experts.abandon()
            self._turns.forget()
            self.ring.abandon()
            if self.beside is not None:
                self.beside.abandon()
            if undo is not None:
                undo.restore()
            raise
        finally:
            self._within, self._turns.undo = False, None

    def _begin_sweep(self, tokens: int | None) -> None:
        """``tokens``: of all passes; None: many."""
        turns = self._turns
        self.drain()
        if self._began is not None:
            # What others took until then says nothing of this machine.
            began, waited = self._began
            self.sweep_s = turns.ended[0] - began - (turns.ended[1] - waited)
        if self.layers.keep_adopted():
            self.ring.reorder(self.layers.order)
            self._tell_order()
        for call in self.before_sweep:
            call()
        if turns.undo is not None:
            turns.undo.begin()
        self.ring.begin_sweep()
        if self.beside is not None:
            self.beside.begin_sweep()
        self.metrics.sweeps += 1
        self._began, turns.tokens = (self.metrics.clock(), self.metrics.ranks_s), 0
        turns.pooled = self.experts is not None and self.experts.begin(tokens)
        if turns.pooled:
            turns.tokens = tokens or 0
        if not self._transport.alone:
            self._transport.begin_sweep(pooled=turns.pooled)

    def _end_sweep(self) -> None:
        """All units were handed over, so all that was read for this sweep is there."""
        if self.experts is not None:
            self.experts.end()
            if self._turns.pooled:
                self._turns.all_done()
        if self._turns.undo is not None:
            self._turns.undo.passed()
        self.ring.reader.check()
        for t in self.tables:
            if t.reader is not None:
                t.reader.check()

    def drain(self) -> None:
        """Wait for all that was handed to the device, and give its slots back for reading ahead."""
        self._turns.drain()
