"""Streams a loaded model: its streamed modules take their weights from the ring, for one pass or several at a time."""

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
from ..machine.interrupts import check, moments
from ..modules.hooks import absent, caches_in, handles, put, swap, unswap
from .executor import LayerExecutor, Recorded, RecordedPass, Wanted, in_turn
from .seams import ExpertCaches, KVOffloader, Stage
from .streamed_layers import Binding, StreamedLayers
from .undo import Undo

# Caches that are not restored after a failed pass, since their batch ends (``mlx_lm.generate.BatchGenerator``).
BATCHED = {BatchKVCache, BatchRotatingKVCache}


class Streaming:
    """Streams a model. Arguments are as in ``Weights`` and ``LayerExecutor``.

    Attributes:
        experts: expert caches; None: there are none. See ``join``.
        after_unit: functions to call in the middle of a pass, each time that a unit was handed to the device.
        before_pass: functions to call before each pass, when nothing is running and layers may be shed.
        pass_s: seconds of the last pass, until its last unit was computed; None before the first.
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
        self.after_unit: list[Callable[[], object]] = [*moments]
        self.before_pass: list[Callable[[], object]] = []
        self.experts: ExpertCaches | None = None
        self.kv: KVOffloader | None = None
        self.pass_s: float | None = None
        self._began: tuple[float, float] | None = None  # of the pass: time, and seconds spent waiting for ranks by then
        self._within = False  # inside a transaction
        self._several = False  # inside run_passes
        self._executor = LayerExecutor(metrics, self.after_unit, evaluates=evaluates, transport=transport)
        transport.attach(self._executor, lambda: None if self.experts is None else self.experts.settle())
        self.bind(bound)

    # Between passes

    def drain(self) -> None:
        self._executor.drain()

    def bind(self, bound: Binding) -> None:
        """Streams the model through this ring. A previous ring must have been released."""
        self.tables, self.ring = bound.tables, bound.ring
        self.layers = StreamedLayers(bound, self._executor, self._copies, self._transport)
        for t in self.tables:
            unswap(t.module)  # on ranks other than the first, zeros stood in for the head
            put(t.table.layer.parameters, absent([p.array for p in t.table.layer.parameters]))
            swap(t.module, "Streamed", *t.calls(self._executor.whole))
        self._executor.pooled = False
        if self.experts is not None:
            self.experts.bind(self.ring, bound.units)
        swap(self.model, "Streamed", self._forward, whole_model=True)
        self._tell_order()

    def release(self) -> None:
        """Frees slots, threads and files and restores the model's classes, so that it can be bound to another ring."""
        with self.exclusive:
            if self.kv is not None:
                self.drain()
            self._let_go()
        self.layers.remove()
        for t in self.tables:
            unswap(t.module)
        unswap(self.model)

    def join(self, experts: ExpertCaches | None, kv: KVOffloader | None) -> None:
        """Uses these expert caches and this KV offload from now on. The caller closes the previous ones."""
        self.drain()
        if experts is not None:
            experts.bind(self.ring, self.layers.units)
        self.experts = self._executor.experts = experts
        self.kv = self._executor.kv = kv
        self._executor.done = None if experts is None and kv is None else self._done
        self._tell_order()

    def shed(self, layers: Sequence[nn.Module]) -> None:
        """Streams these layers from the next pass on."""
        self.drain()
        self.layers.shed(layers)
        self.ring.reorder(self.layers.order)
        self._tell_order()
        clear_cache()

    def _tell_order(self) -> None:
        if self.kv is not None:
            self.kv.expect(self.layers.modules)

    def _done(self, lease: Lease) -> None:
        if self.experts is not None:
            self.experts.done(lease)
        if self.kv is not None and (module := self.layers.ends(lease.unit)) is not None:
            self.kv.computed(module)

    def close(self) -> None:
        """Frees slots, threads and files. The model cannot be called afterwards. Safe to call twice."""
        with self.exclusive:
            self._let_go()
            for each in (self.experts, self.kv):
                if each is not None:
                    each.close()
            self.experts = self._executor.experts = None

    def _let_go(self) -> None:
        self._executor.forget()
        for t in self.tables:
            if t.reader is not None:
                t.reader.close()
        self.layers.weights.close()
        self.ring.close()

    # A pass

    @property
    def pass_tokens(self) -> int:
        return self._executor.tokens

    def _forward(self, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Handles a call of the model: a single pass, or one of those in ``run_passes``."""
        if self._several:
            out = original(*args, **kwargs)
            if (recording := self._executor.recording) is not None:
                recording.end(args, kwargs)
                recording.moved = self._executor.moved()
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
            self._begin_pass(None if ids is None else ids.size, 1)
            out = original(*args, **kwargs)
            if not self._transport.alone:
                self._executor.settle()
            self._end_pass()
            if ids is not None and ids.shape[1] == 1:
                # Release the last unit's slot while the head and the resident layers behind it are computed: for one
                # token the caller needs all of their results.
                mx.async_eval(handles(out))
                self.drain()
        return out

    @contextmanager
    def transaction(self, cache: list[Any] | None, tokens: int) -> Iterator[Undo | None]:
        """If the body fails, ends its pass and restores ``cache``, to which the body adds ``tokens`` tokens. Does
        nothing inside another transaction.

        Yields:
            the undo, which can restore the caches until the next pass begins; None: nothing to restore.
        """
        if self._within:
            yield None
            return
        self._within = True
        undo = None
        try:
            if self.kv is not None:
                # Caches are stored only once their layers are known to be computed.
                self.drain()
                if cache:
                    self.kv.adopt(cache)
            undo = self._executor.undo = Undo(cache, tokens) if cache else None
            yield undo
        except BaseException:
            self._executor.abandon()
            self._transport.abandon()
            if self.experts is not None:
                self.experts.abandon()
            self._executor.forget()
            self.ring.abandon()
            if self.kv is not None:
                self.kv.abandon()
            if undo is not None:
                undo.restore()
            raise
        finally:
            self._within, self._executor.undo = False, None

    def _begin_pass(self, tokens: int | None, passes: int) -> None:
        """Begins a pass, or several that share it, over ``tokens`` tokens; None: many."""
        executor = self._executor
        self.drain()
        if self._began is not None:
            # Without the time spent waiting for other ranks.
            began, waited = self._began
            self.pass_s = executor.ended[0] - began - (executor.ended[1] - waited)
        if self.layers.adopting and self.layers.keep_adopted():
            self.ring.reorder(self.layers.order)
            self._tell_order()
        for call in self.before_pass:
            call()
        if executor.undo is not None:
            executor.undo.begin()
        self.ring.begin_pass()
        if self.kv is not None:
            self.kv.begin_pass()
        self.metrics.sweeps += 1
        self._began, executor.tokens = (self.metrics.clock(), self.metrics.ranks_s), 0
        before, executor.pooled = executor.pooled, self.experts is not None and self.experts.begin(tokens, passes)
        if executor.pooled != before and self.experts is not None and (self.layers.order or self.experts.shared):
            self.ring.reorder(self.layers.order)
        if executor.pooled:
            executor.tokens = tokens or 0
        if not self._transport.alone:
            self._transport.begin_pass(pooled=executor.pooled)

    def _end_pass(self) -> None:
        """Ends a pass, all of whose units were handed over and so have been read; checks that no file has changed."""
        if self.experts is not None:
            self.experts.end()
            if self._executor.pooled:
                self._executor.ended = self.metrics.clock(), self.metrics.ranks_s
        if self._executor.undo is not None:
            self._executor.undo.passed()
        self.ring.reader.check()
        for t in self.tables:
            if t.reader is not None:
                t.reader.check()

    # Several passes

    def advance(self) -> None:
        """Hands over the open unit, and notes for the undo that the graph built so far is about to be computed."""
        self._executor.close_part()
        self._executor.reached(self._executor.moved())

    def run_passes(
        self, passes: Sequence[Callable[[], mx.array]], *, tokens: int | None = None, wanted: Wanted = None
    ) -> list[mx.array]:
        """Runs several forward passes that share one reading of the weights: each unit serves all of them.

        The graphs of all passes are built first, so each pass sees the caches as the one before leaves them; then they
        are evaluated unit by unit. The results equal those of separate passes bit for bit. The model must not evaluate
        anything inside its forward pass.

        Args:
            tokens: of all passes together; None: many.
            wanted: numbers of the passes whose results the caller needs; a streamed head is not computed for the
                others. None: all.

        Returns:
            the results of these passes, not necessarily evaluated.
        """
        recorded: list[RecordedPass] = []
        made: dict[int, list[mx.array | None]] = {}
        heads = {unit for t in self.tables if t.table.head for unit, _ in t.rows}
        if not self._transport.alone and len(passes) > 1:
            tokens = None  # expert caches would run pass by pass, but ranks have to go layer by layer
        outputs: list[mx.array] = []
        with self.exclusive, self.transaction(None, 0):
            self._begin_pass(tokens, len(passes))
            self._several = True
            try:
                if self._executor.pooled:
                    return self._pooled(passes, wanted)
                with self._transport.passes() as next_pass:
                    for number, run in enumerate(passes):
                        self._executor.recording = RecordedPass(made)
                        next_pass()
                        # Drop unneeded results, which would hold their inputs, above all caches.
                        result = run()
                        outputs += [result] if wanted is None or number in wanted else []
                        del result
                        recorded.append(self._executor.recording)
                        check()
            finally:
                self._executor.recording, self._several = None, False
                made.clear()  # the graphs hold the arrays
            for unit in in_turn(recorded, heads, self._executor.reached, wanted):
                self._evaluate(unit)
            if not self._transport.alone:
                self.drain()  # the head may wait for other ranks
            for each in recorded:
                each.settle()
            self._end_pass()
        return outputs

    def _pooled(self, passes: Sequence[Callable[[], mx.array]], wanted: Wanted) -> list[mx.array]:
        """Runs the passes one after the other: experts that one has read are cached for the next."""
        outputs: list[mx.array] = []
        for number, run in enumerate(passes):
            result = run()
            outputs += [result] if wanted is None or number in wanted else []
            del result
            assert self.experts is not None
            self.experts.settle()
            check()
        self._end_pass()
        return outputs

    def leaves(self, array: mx.array) -> None:
        """Evaluates an array that the current pass made: together with its caches, or now if it is not recorded."""
        if self._executor.recording is not None:
            self._executor.recording.tail.append(array)
        else:
            mx.eval(array)

    def _evaluate(self, passes: list[Recorded]) -> None:
        """Computes one unit's recorded work of all passes, or that of a resident layer whose outputs go to
        other ranks."""
        unit = passes[0].unit
        lease = None if unit is None else self.ring.take(unit)
        if lease is not None:
            self._executor.arrive(lease)
        for recorded in passes:
            if not all(each.ready for each in recorded.arriving):
                self.drain()
            for each in recorded.arriving:
                each.wait()
            self._executor.reached(recorded.moved)
            arrays, recorded.moved, recorded.arrays = recorded.arrays, [], []
            if recorded is passes[-1] and lease is not None:
                self._executor.hand_over(lease, arrays)
            else:
                # One pass at a time: MLX allocates when work is queued, and frees activations only after the pass.
                with self._transport.working():
                    mx.eval(arrays)
                if recorded is passes[-1]:
                    for call in self.after_unit:
                        call()
                else:
                    self.drain()  # the unit before is computed as well: release its slot
            del arrays
            self._transport.depart(recorded.leaving)
            recorded.leaving = []
