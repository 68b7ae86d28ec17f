"""Reads routed experts on demand: experts that were used are cached; others are read once a router has chosen them.

A layer's switch is called with slot numbers in place of expert indices, and with the cache's arrays in place of its
weights. A table says which slot holds which expert; the graph looks it up, and the host writes it. So the graphs of a
layer and of the next one are built before the router's choice is known: at the next switch the host waits for the
router, reads all missing experts at once and writes the table. Before that, nothing that depends on the table is handed
to the device.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from outcore.disk.layout import GPU_ALIGN
from outcore.disk.metrics import Metrics
from outcore.disk.ring import Lease, Ring, Slot
from outcore.engine.streamed_layers import StreamedUnit
from outcore.machine.allocator import clear_cache
from outcore.machine.device import device_kind, on_cuda, on_metal
from outcore.machine.interrupts import check
from outcore.modules.hooks import Call, arrays_in, swap, unswap
from outcore.plan.plan import Plan
from outcore.sizes import BLOCK, round_up

from .device_stretches import DeviceMemory
from .expert_cache import CachedSwitch, ExpertReads, Shared, SwitchUnit, stacked
from .expert_plan import missing, reads_experts
from .expert_prefetch import ExpertPrefetch, Routed
from .expert_windows import Windows
from .switches import ROUTES, block_of, routers_of

if TYPE_CHECKING:
    from outcore.engine.model_profile import ModelProfile
    from outcore.engine.streaming import Streaming


# Method of a switch that adds up its experts' results if it is called with more than hidden states and indices: it
# gets the results by expert, which may come in several groups, and what follows the indices.
COMBINE = "outcore_combine"


class Experts:
    """The expert caches of a model.

    Args:
        advance: called before anything is handed to the device while a pass's graph is unfinished.
        eager: wait for each router at its own switch, because the model evaluates arrays inside its forward pass.

    Attributes:
        switches: one for each layer with experts, in call order.
        pooled: whether this pass's calls use the caches; if not, the ring's slot has all experts of a layer.
    """

    def __init__(
        self,
        units: Sequence[SwitchUnit],
        slots: Sequence[int],
        metrics: Metrics,
        device: str,
        advance: Callable[[], None],
        *,
        eager: bool = False,
    ) -> None:
        self.units = units
        self.metrics = metrics
        self.pooled = False
        self._advance = advance
        self._eager = eager
        self._pending: _Pending | None = None
        self._windows: Windows | None = None
        self._placed = DeviceMemory() if on_cuda() else None
        tables = _tables([u.switch.experts for u in units for _ in range(2)], device)
        self.switches = [
            CachedSwitch(u, n, table, inside, device, self._placed)
            for u, n, table, inside in zip(units, slots, tables[::2], tables[1::2], strict=True)
        ]
        self._shared = [each for each, n in zip(self.switches, slots, strict=True) if not n]
        self._trunk = 0  # bytes of the units that are streamed whichever experts are used
        self._reads = ExpertReads(metrics, device)
        self.prefetch = None if eager else ExpertPrefetch(self.switches, self._reads, metrics)
        for each in self.switches:
            swap(each.unit.switch.module, "Pooled", self._call(each))

    def bind(self, ring: Ring, units: Sequence[StreamedUnit]) -> None:
        for switch in self.switches:  # whose weights the new units have withdrawn
            switch.withdraw()
        self._reads.reader = ring.reader
        if self._placed is not None:
            ring.reader.move = self._placed.move
        mine = [u for u in units if not u.experts]
        self._trunk = sum(u.unit.read_bytes for u in mine)
        self._lend(ring, max([u.unit.slot_bytes for u in mine], default=0))
        self._windows = Windows([s for s in self.switches if s not in self._shared], units, ring)

    def _lend(self, ring: Ring, trunk: int) -> None:
        """Lets the layers without a cache take turns with what the units of other weights leave of the ring's slots."""
        free = list[Shared]()
        for slot in ring.slots if self._shared else []:
            at = round_up(trunk, BLOCK)
            free.append(Shared(slot.array, slot.base + at, slot.payload[at:]))
        for n, switch in enumerate(self._shared):
            switch.lend(free[n % len(free)] if free else None)

    @property
    def shared(self) -> bool:
        return bool(self._shared)

    @property
    def pending(self) -> bool:
        return self._pending is not None

    @property
    def slots(self) -> list[int]:
        return [each.policy.slots for each in self.switches]

    @property
    def expert_s(self) -> float:
        return self._reads.expert_s or 1e-9

    # A pass

    def begin(self, tokens: int | None, passes: int = 1) -> bool:
        self._pending = None
        own = [0 if s in self._shared else s.policy.slots for s in self.switches]
        shapes = [(s.unit.switch.experts, s.unit.used, n) for s, n in zip(self.switches, own, strict=True)]
        self.pooled = tokens is not None and reads_experts(tokens, shapes)
        if self.pooled and tokens and passes > 1 and self._trunk:
            # These passes would read all other weights one by one; through the ring they share one reading.
            costs = [sum(t.read_bytes for t in s.unit.tensors) for s in self.switches]
            pairs = zip(costs, shapes, strict=True)
            saved = [n * (shape[0] - shape[2] - missing(*shape, tokens)) for n, shape in pairs]
            self.pooled = (passes - 1) * self._trunk <= sum(saved)
        if self.pooled and tokens and on_metal():
            self.pooled = all(same_kernel(tokens * used, experts, slots or experts) for experts, used, slots in shapes)
        if self.prefetch is not None:
            self.prefetch.begin()
        for each in self.switches:
            if not self.pooled:
                each.leave()
                # Copies between ring and caches do not wait for prefetched experts, so wait here.
                each.arrived(each.arriving, cancel=True)
            if each.policy.slots == each.unit.switch.experts:
                self._fill(each)
        if self._windows is not None:
            self._windows.begin()
        return self.pooled

    def end(self) -> None:
        """Ends a pass and evaluates everything that uses the caches, because these may change before the caller,
        perhaps another thread, evaluates the result."""
        self.settle()
        under_way = [s for s in self.switches if s.last]
        if under_way:
            mx.eval([s.last for s in under_way])
        for switch in under_way:
            switch.last = []

    def abandon(self) -> None:
        self._pending = None
        for switch in self.switches:
            # Waits for the device. Results that cannot be evaluated are not needed.
            with contextlib.suppress(RuntimeError):
                mx.eval(switch.last)
            switch.last = []
        mx.synchronize()
        if self._windows is not None:
            self._windows.begin()

    def done(self, lease: Lease) -> None:
        if self._windows is not None and not self.pooled:
            self._windows.done(lease)

    def _call(self, switch: CachedSwitch) -> Call:
        def call(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            predicting = self.prefetch is not None and self.prefetch.predicting
            if self.pooled and not predicting:
                self.settle()
                if switch.stays:
                    return original(*args, **kwargs)
            x, indices, rest = _taken(args, kwargs)
            if predicting:
                raise Routed(indices)
            if not self.pooled:
                if self._windows is not None:
                    self._windows.route(switch, indices)
                return original(*args, **kwargs)
            # Work that uses this cache must be done before its table and slots change.
            mx.eval(switch.last)
            switch.last = []
            if self._eager or min(indices.size, switch.unit.switch.experts) > switch.policy.slots:
                return self._at_once(switch, original, x, indices, rest)
            self._advance()
            predicted = None if self.prefetch is None else self.prefetch.predict(switch, x)
            scalars = None
            if self._placed is not None:
                scalars = mx.uint8 if switch.unit.switch.experts <= 256 else mx.uint16
            numbers = ExpertIndices(indices, scalars=scalars)
            next_numbers = None if predicted is None else ExpertIndices(predicted, scalars=scalars)
            mx.async_eval(numbers.arrays, [] if next_numbers is None else next_numbers.arrays)
            with switch.in_place():
                out = original(x, switch.table[indices], **rest)
            self._pending = _Pending(switch, numbers, next_numbers)
            switch.last = [out] if isinstance(out, mx.array) else arrays_in(out)
            return out

        routes = hasattr(type(switch.unit.switch.module), ROUTES)

        def once(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            if switch.entered or (routes and len(args) + len(kwargs) != 2):
                return original(*args, **kwargs)  # by its own code, for one token after the other; or it will
            switch.entered = True
            try:
                combine = getattr(switch.unit.switch.module, COMBINE, None)
                if combine is None or not self.pooled or len(args) + len(kwargs) == 2:
                    return call(original, args, kwargs)
                x, indices, rest = _taken(args, kwargs)
                return combine(call(original, (x, indices), {}), *args[2:], **rest)
            finally:
                switch.entered = False

        return once

    def settle(self) -> None:
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        switch = pending.switch
        tokens = pending.numbers.by_token()
        check()
        wanted = switch.use(tokens)
        if self.prefetch is not None:
            self.prefetch.routed(switch, wanted)
        for group in switch.policy.groups(wanted):
            self._reads.bring(switch, group.loads, group.experts)
            self.metrics.experts.used += len(group.experts)
            self.metrics.experts.read += len(group.loads)
        if self.prefetch is not None:
            self.prefetch.read()
            if pending.predicted is not None:
                self.prefetch.prefetch(switch, set(pending.predicted.by_token().ravel().tolist()))

    def _at_once(
        self, switch: CachedSwitch, original: Callable[..., Any], x: mx.array, indices: mx.array, rest: dict[str, Any]
    ) -> mx.array:
        """Waits for the router and reads missing experts before the call is computed, in groups if they exceed the
        slots.

        Each group is computed for all tokens, so that the kernels are those of the whole call; results of experts that
        are not in the group are discarded.
        """
        self._advance()
        tokens = ExpertIndices(indices).by_token()
        check()
        numbers = tokens.reshape(indices.shape)
        out: mx.array | None = None
        for group in switch.policy.groups(switch.use(tokens)):
            self._reads.bring(switch, group.loads, group.experts)
            self.metrics.experts.used += len(group.experts)
            self.metrics.experts.read += len(group.loads)
            with switch.in_place():
                now = original(x, switch.table[indices], **rest)
            if out is not None:
                mine = mx.array(np.isin(numbers, group.experts))
                now = mx.where(mine.reshape(*mine.shape, *(1,) * (now.ndim - mine.ndim)), now, out)
            mx.eval(now)
            out = now
        assert out is not None
        return out

    # Memory

    def resize(self, slots: Sequence[int]) -> None:
        """Resizes the caches between passes. The most valuable experts stay. One layer's cache at a time is in memory
        twice."""
        self._pending = None
        self._shared = [each for each, n in zip(self.switches, slots, strict=True) if not n]
        for switch, count in zip(self.switches, slots, strict=True):
            if count:
                switch.resize(count)
        clear_cache()

    def _fill(self, switch: CachedSwitch) -> None:
        """If the cache has room for all experts, reads those that are missing, so that no call waits for a router."""
        if self.pooled == switch.stays:
            return
        if not self.pooled:
            switch.withdraw()
            return
        if not switch.policy.complete:
            switch.arrived(switch.arriving)
            missing = np.flatnonzero(switch.policy.slot_of < 0).tolist()
            self._reads.bring(switch, [(e, e) for e in missing])
        switch.stay()

    def close(self) -> None:
        if self._windows is not None:
            self._windows.close()
        for switch in self.switches:
            unswap(switch.unit.switch.module)
            switch.settle()
            switch.withdraw()
            switch.cache.close()
        if self._placed is not None:
            self._placed.close()
        self.switches, self._pending, self._windows, self.prefetch = [], None, None, None


def experts_for(streaming: Streaming, profile: ModelProfile, plan: Plan) -> Experts | None:
    units, slots = [], [n for _, n in plan.pools]
    for i, _ in plan.pools:
        layer, known, size = profile.layers[i], profile.parts[i], profile.size.layers[i].experts
        switch = known.switch
        assert size is not None
        tensors = tuple(stacked(layer, switch, known.casts, profile.place))
        parameters = tuple(layer.parameters[n] for n in switch.streamed)
        routers = routers_of(layer, known.pieces, switch)
        # Look-ahead calls routers out of their turn, so they have to be in memory.
        block = block_of(layer, switch) if set(routers) <= set(dict(plan.kept).get(i, ())) else None
        units.append(SwitchUnit(layer.path, switch, parameters, tensors, size.used, block))
    before = streaming.experts
    assert before is None or isinstance(before, Experts)
    if before is not None and [u.switch.module for u in units] == [u.switch.module for u in before.units]:
        for unit, switch in zip(units, before.switches, strict=True):
            switch.unit = unit
        before.resize(slots)
        return before
    if before is not None:
        before.close()
    if not units:
        return None
    return Experts(units, slots, streaming.metrics, device_kind(), streaming.advance, eager=streaming.evaluates)


# With so many expert indices, mlx-lm sorts them (``SwitchGLU``, mlx_lm/models/switch_layers.py).
SORTED = 64


def same_kernel(numbers: int, experts: int, slots: int) -> bool:
    """Whether Metal uses the same kernel with ``slots`` cached experts as with all; kernels differ in the last bits.

    With at least 4 indices per expert of the array, sorted indices go to another kernel (``GatherQMM::eval_gpu``,
    mlx/backend/metal/quantized.cpp, MLX 0.32.4). Not measured: nothing has run on Metal.
    """
    return numbers < SORTED or (numbers // experts >= 4) == (numbers // slots >= 4)


@dataclass(frozen=True)
class _Pending:
    """A call whose experts are not known yet. ``predicted``: the prediction for the next layer; None: there is none."""

    switch: CachedSwitch
    numbers: ExpertIndices
    predicted: ExpertIndices | None


# An array of at most so many bytes is allocated where a CUDA device and the host can read it (``SmallSizePool``, MLX's
# mlx/backend/cuda/allocator.cpp). A larger one is copied into new managed memory when the host reads it.
SCALAR = 8


MOST_SCALARS = 32


class ExpertIndices:
    """Expert indices, (..., experts per token), on their way to the host. The caller evaluates ``arrays``. ``scalars``:
    an integer dtype, to split few indices into arrays that are small enough for the host to read fast."""

    def __init__(self, indices: mx.array, *, scalars: mx.Dtype | None = None) -> None:
        self._width = indices.shape[-1]
        self.arrays = [indices]
        if scalars is not None and indices.size <= MOST_SCALARS:
            # Cast after slicing: a slice alone would refer to a larger array.
            flat, each = indices.reshape(-1), SCALAR // scalars.size
            self.arrays = [flat[n : n + each].astype(scalars) for n in range(0, indices.size, each)]

    def by_token(self) -> npt.NDArray[np.int64]:
        """Waits for the indices; returns them as int64 (tokens, experts per token)."""
        found = [np.array(a).astype(np.int64).ravel() for a in self.arrays]
        return np.concatenate(found).reshape(-1, self._width)


def _tables(experts: Sequence[int], device: str) -> list[mx.array]:
    """Returns, for each ``n`` of ``experts``, a uint32 table (n,) in memory that the host can write to."""
    starts = [0, *itertools.accumulate(round_up(4 * n, GPU_ALIGN) for n in experts)]
    memory = Slot(starts[-1], device)
    whole = memory.array
    tables = [
        whole[memory.base + at : memory.base + at + 4 * n].view(mx.uint32)
        for at, n in zip(starts, experts, strict=False)
    ]
    mx.eval(tables)
    return tables


def _taken(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[mx.array, mx.array, dict[str, Any]]:
    rest = dict(kwargs)
    values = list(args)
    for name in ("x", "indices")[len(values) :]:
        values.append(rest.pop(name))
    return values[0], values[1], rest
