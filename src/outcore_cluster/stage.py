"""Layers that lie on several ranks: each rank sends the outputs of its layers to the ranks that need them.

Every rank runs the whole forward pass. A rank does not compute another rank's layer (``foreign``): it returns arrays in
memory that the link writes to. So the graph of the following layers is built before the bytes arrive; before anything
that depends on them is evaluated, the rank waits for them.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from outcore.disk.metrics import Metrics
from outcore.engine.executor import Leaving, Recorded, RecordedPass
from outcore.engine.seams import PassRecorder
from outcore.engine.streamed_layers import no_product
from outcore.engine.undo import Moved, Undo
from outcore.errors import LinkError
from outcore.modules.hooks import TAP, caches_in, handle, handles, swap, unswap

from .cuts import Cuts, LayerCall, Shape, filled
from .foreign import advance
from .link_protocol import Arrival, Link

if TYPE_CHECKING:
    from .rank_share import RankShare


@dataclass
class Incoming:
    """Outputs of one layer of rank ``source`` in one pass. ``number``: the layer's place among those in ``rounds``."""

    link: Link
    source: int
    into: list[memoryview]
    metrics: Metrics
    arrivals: list[Arrival] = field(default_factory=list)
    rounds: Rounds | None = None
    number: int = 0

    def post(self) -> None:
        self.arrivals = [self.link.receive(self.source, into) for into in self.into]

    @property
    def ready(self) -> bool:
        return bool(self.arrivals) and all(arrival.ready for arrival in self.arrivals)

    def wait(self) -> None:
        if self.rounds is not None:
            # The next layer's outputs may arrive while this layer's are in use; the layer after it reuses its buffers.
            self.rounds.post(self.number + 2)
        began = self.metrics.clock()
        for arrival in self.arrivals:
            arrival.wait()
        self.metrics.ranks_s += self.metrics.clock() - began


class Rounds:
    """Posts the receives of several passes that share one reading of the weights, in the order of the messages: layer
    after layer, and for each layer pass after pass. Layers use two sets of buffers in turn: when the third layer's
    outputs arrive, the first layer's are no longer needed."""

    def __init__(self) -> None:
        self._rounds: list[list[Incoming]] = []
        self._posted = 0
        self._pass = -1
        self._at = 0
        self._buffers: dict[tuple[int, int, int], mx.array] = {}

    def next_pass(self) -> None:
        self._pass, self._at = self._pass + 1, 0

    def buffer(self, nbytes: int, n: int) -> mx.array:
        """Returns the buffer for the ``n``-th array of the next layer."""
        key = (self._pass, self._at % 2, n)
        found = self._buffers.get(key)
        if found is None or found.nbytes != nbytes:
            found = self._buffers[key] = new_buffer(nbytes)
        return found

    def add(self, incoming: Incoming) -> None:
        if self._at == len(self._rounds):
            self._rounds.append([])
        self._rounds[self._at].append(incoming)
        incoming.rounds, incoming.number = self, self._at
        self._at += 1

    def post(self, rounds: int) -> None:
        """Posts the receives of the first ``rounds`` layers."""
        while self._posted < min(rounds, len(self._rounds)):
            for incoming in self._rounds[self._posted]:
                incoming.post()
            self._posted += 1


def new_buffer(nbytes: int) -> mx.array:
    """Returns a buffer that is allocated at once, even while a device has work queued."""
    return mx.array(np.zeros((nbytes,), dtype=np.uint8))


def bytes_of(array: mx.array) -> memoryview:
    view: memoryview = np.array(array, copy=False).data
    return view


class PipelineStage:
    """Receives and sends layer outputs on one rank of a model that lies on several.

    Args:
        metrics: counts the seconds of waiting.

    Attributes:
        recorder: the executor that streams this rank's layers; this object itself if all of them are in memory.
        rounds: receives of the passes that are being recorded.
        immediate: in this pass, a layer's call waits for the outputs that it receives.
        before_send: called before outputs that are sent are evaluated.
        undo: restores the caches of a failed pass if nothing is streamed; None: they need not be restored.
    """

    def __init__(self, share: RankShare, metrics: Metrics) -> None:
        self.link, self.metrics, self._share = share.link, metrics, share
        self.recorder: PassRecorder = self
        self.recording: RecordedPass | None = None
        self.rounds: Rounds | None = None
        self.undo: Undo | None = None
        self.immediate = False
        self.before_send: Callable[[], object] = lambda: None
        self._pending: list[Incoming] = []
        self._wanted: defaultdict[int, set[int]] = defaultdict(set)
        self._sent: defaultdict[int, dict[int, list[int]]] = defaultdict(dict)
        for layer, n, user in crossings(share.cuts, share.owners, share.filled, share.read):
            if user == self.link.rank:
                self._wanted[layer].add(n)
            if share.own(layer):
                self._sent[layer].setdefault(n, []).append(user)
        self._copies: Mapping[int, nn.Module] = {}
        self._numbers = {id(share.layers[i].module): i for i in share.cuts.order if share.own(i)}
        self._reused = reusable(share.cuts) - {*share.read}

    @property
    def eager(self) -> bool:
        return self._share.eager

    def install(self) -> None:
        """Replaces the calls of other ranks' layers by receives, and the head on all ranks but rank 0 by a stand-in."""
        for i in self._share.cuts.order:
            if not self._share.own(i):
                swap(self._share.layers[i].module, "Foreign", self._foreign(i, self._share.cuts.calls[i]))
        if self.link.rank:
            for table in self._share.heads:
                nothing = functools.partial(_no_logits, table.places[0].shape[0])
                if table.looked_up:
                    swap(table.layer.module, "Foreign", _as_it_is, nothing)
                else:
                    swap(table.layer.module, "Foreign", nothing)
        for i in self._numbers.values():
            self.watch(self._share.layers[i].module)

    def attach(self, recorder: PassRecorder, before_send: Callable[[], object]) -> None:
        self.recorder, self.before_send = recorder, before_send

    def transaction(self, undo: Undo | None) -> None:
        self.undo = undo

    def begin_pass(self, *, pooled: bool) -> None:
        """If ``pooled``, layers wait for received outputs at once, because routers are evaluated on the way."""
        self.immediate = pooled

    @contextmanager
    def passes(self) -> Iterator[Callable[[], None]]:
        """Records several passes; the caller calls the yielded function before each."""
        rounds = self.rounds = Rounds()
        try:
            yield rounds.next_pass
        finally:
            self.rounds = None

    def watch(self, module: nn.Module) -> None:
        """From now on sends the outputs of this layer, which is in memory, if other ranks need them."""
        if self._numbers.get(id(module)) in self._sent:
            unswap(module)
            swap(module, "Ranked", functools.partial(self._resident, id(module)))

    def unwatch(self, module: nn.Module) -> None:
        """Ends ``watch``, before the layer is streamed."""
        if id(module) in self._numbers:
            unswap(module)

    # Receiving

    def _foreign(self, layer: int, call: LayerCall) -> Callable[..., Any]:
        assert call.sized_by is not None
        place, batch_at, tokens_at = call.sized_by
        wanted, tap = self._wanted[layer], self._share.layers[layer].module.__dict__.get(TAP)

        def foreign(_: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            sized = args[place] if isinstance(place, int) else kwargs[place]
            batch, tokens = sized.shape[batch_at], sized.shape[tokens_at]
            if call.advances and layer in self._copies:
                self._fill(self._copies[layer], args, kwargs)
            else:
                advance(caches_in(args, kwargs), call.advances, batch, tokens)
            arrays: list[mx.array] = []
            into: list[memoryview] = []
            for n, shape in enumerate(call.leaves):
                if shape is None or n not in wanted:
                    arrays.append(_nothing(shape, batch, tokens))
                    continue
                dims = shape.of(batch, tokens)
                nbytes = int(np.prod(dims)) * shape.dtype.size
                buffer = self._buffer(layer, nbytes, len(into))
                arrays.append(buffer.view(shape.dtype).reshape(dims))
                into.append(bytes_of(buffer))
            if into:
                self._expect(Incoming(self.link, self._share.owners[layer], into, self.metrics))
            out = filled(call.outputs, iter(arrays))
            if tap is not None:
                tap(out)
            return out

        return foreign

    def fill(self, copy: nn.Module | None) -> None:
        """From now on calls the copies of other ranks' layers in ``copy`` to fill this rank's caches, so that a draft
        can continue from these. The layers' inputs are exact; only keys, values and states are made with the copy's
        weights. None ends it."""
        places = {} if copy is None else dict(copy.named_modules())
        self._copies = {i: places[layer.path] for i, layer in enumerate(self._share.layers) if places}

    def _fill(self, copy: nn.Module, args: Any, kwargs: Any) -> None:
        """Calls the copy of a layer for what it writes to its caches. Its outputs are not computed."""
        caches = caches_in(args, kwargs)
        if not caches:
            return
        # Copied handles, because a layer may write to its arguments.
        copy(*map(_own, args), **{name: _own(value) for name, value in kwargs.items()})
        self._built(handles(caches), [], caches)

    def _built(self, arrays: list[mx.array], leaving: Leaving, *seen: Any) -> None:
        """Evaluates a layer's arrays and sends those in ``leaving``; while passes are recorded, adds them to the
        recording."""
        recorder, within = self.recorder, self.recorder.recording
        if within is None:
            self.settle()
            recorder.reached(recorder.moved())
            if leaving:
                self.depart(leaving)
            else:
                mx.eval(arrays)
            return
        arrays = [*arrays, *(array for _, array in leaving)]
        within.units.append(Recorded(None, arrays, recorder.moved(), within.arriving(), leaving))
        within.see(*seen)

    def _buffer(self, layer: int, nbytes: int, n: int) -> mx.array:
        if self.recorder.recording is None or self.rounds is None or layer not in self._reused:
            return new_buffer(nbytes)
        return self.rounds.buffer(nbytes, n)

    def _expect(self, incoming: Incoming) -> None:
        recording = self.recorder.recording
        if recording is not None:
            assert self.rounds is not None
            self.rounds.add(incoming)
            recording.incoming.append(incoming)
            return
        incoming.post()
        self._pending.append(incoming)
        if self.eager or self.immediate:
            self.settle()

    @property
    def waits(self) -> bool:
        return not all(incoming.ready for incoming in self._pending)

    def settle(self) -> None:
        """Waits for received outputs; those of passes that are being recorded are waited for later."""
        pending, self._pending = self._pending, []
        for incoming in pending:
            incoming.wait()

    def whole(self, model: nn.Module) -> None:
        """Waits at the end of each call of ``model``, of which this rank streams nothing, for received outputs."""
        swap(model, "Ranked", self._whole)

    def _whole(self, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        try:
            out = original(*args, **kwargs)
            self.settle()
        except BaseException:
            self.abandon()
            raise
        return out

    def abandon(self) -> None:
        self._pending, self.rounds = [], None

    # Sending

    def leaving(self, module: int, out: Any) -> Leaving:
        """Returns the outputs that other ranks need, each with the ranks it is sent to. ``module``: the layer's id."""
        layer = self._numbers.get(module)
        sent = self._sent.get(layer, {}) if layer is not None else {}
        if layer is None or not sent:
            return []
        leaves = [value for _, value in tree_flatten(out) if isinstance(value, mx.array)]
        return [(tuple(ranks), _flat(leaves[n], self._share.cuts.calls[layer].leaves[n])) for n, ranks in sent.items()]

    def depart(self, leaving: Leaving) -> None:
        if not leaving:
            return
        self.before_send()
        with self.link.working():
            mx.eval([array for _, array in leaving])
        for ranks, array in leaving:
            for rank in ranks:
                self.link.send(rank, bytes_of(array))

    def _resident(self, module: int, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        out = original(*args, **kwargs)
        self._built(handles(out, args, kwargs), self.leaving(module, out), args, kwargs)
        return out

    def moved(self) -> Moved:
        return [] if self.undo is None else self.undo.moved()

    def reached(self, moved: Moved) -> None:
        if self.undo is not None:
            self.undo.reached(moved)


def _nothing(shape: Shape | None, batch: int, tokens: int) -> mx.array:
    """Returns zeros in place of an output that this rank does not need; they take one element of memory."""
    if shape is None:
        return mx.zeros((0,))
    return mx.broadcast_to(mx.zeros((1,) * len(shape.dims), dtype=shape.dtype), shape.of(batch, tokens))


def _own(value: Any) -> Any:
    return handle(value) if isinstance(value, mx.array) else value


def _flat(array: mx.array, shape: Shape | None) -> mx.array:
    """Returns an output as bytes. Raises ``LinkError`` if it has not the dtype or number of dimensions of ``shape``."""
    if shape is None or array.dtype != shape.dtype or array.ndim != len(shape.dims):
        raise LinkError(f"a layer returned {array.dtype} of shape {array.shape}, expected {shape}: report this")
    return mx.contiguous(array).reshape(-1).view(mx.uint8)


def _no_logits(rows: int, _: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return no_product(args[0], rows)


def _as_it_is(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return original(*args, **kwargs)


def fillable(cuts: Cuts, owners: Mapping[int, int]) -> bool:
    """Whether all inputs of layers that write to caches can be sent to rank 0."""
    used = {leaf for call in cuts.calls.values() if call.advances for leaf in call.uses}
    return all(owners[layer] == 0 or cuts.calls[layer].leaves[n] is not None for layer, n in used)


def crossings(
    cuts: Cuts, owners: Sequence[int], filled: bool = False, read: Sequence[int] = ()
) -> list[tuple[int, int, int]]:
    """Returns the outputs that one rank needs from another, sorted: layer, number of the output, receiving rank. If
    ``filled``, rank 0 also needs the inputs of all layers that write to caches; the first outputs of layers ``read``
    by its draft it always needs."""
    uses = [(owners[i], call.uses) for i, call in cuts.calls.items()] + [(0, cuts.results)]
    uses += [(0, call.uses) for call in cuts.calls.values() if filled and call.advances]
    uses += [(0, frozenset((layer, 0) for layer in read))]
    return sorted({(layer, n, user) for user, leaves in uses for layer, n in leaves if owners[layer] != user})


def reusable(cuts: Cuts) -> set[int]:
    """Returns the layers whose outputs only the next layer uses, so that a later layer's outputs may overwrite them."""
    behind = dict(zip(cuts.order, cuts.order[1:], strict=False))
    users: dict[int, set[int | None]] = {}
    for i, uses in [*((i, call.uses) for i, call in cuts.calls.items()), (None, cuts.results)]:
        for layer, _ in uses:
            users.setdefault(layer, set()).add(i)
    return {layer for layer in users if layer in behind and users[layer] == {behind[layer]}}
