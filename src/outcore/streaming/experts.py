"""Routed experts on demand: those that tokens use are in a pool, and what is missing is read when a router asks for it.

A layer's switch is called with numbers of slots in place of numbers of experts, and with the pool's arrays in place of
its weights; which expert lies where is in a table that the graph looks up and the host writes. So a layer's graph is
built, and the next layer's after it, before anybody knows which experts it will use: the host waits for one layer's
router only when it has reached the next switch, reads what is missing all at once, and writes the table. Nothing that
depends on the table is handed to the device before that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ..disk.layout import BLOCK, Extent, round_up
from ..disk.metrics import Metrics
from ..disk.reader import Reader
from ..disk.ring import Lease, Ring, Slot
from ..model.hooks import Call, arrays_in, swap, unswap
from ..model.lazy_model import DTYPES
from ..planning.expert_curve import Ghosts
from ..planning.expert_policy import Load
from ..planning.expert_size import pooled_sweep
from ..system.interrupts import check
from .expert_windows import Windows
from .pooled_switch import PooledSwitch, SwitchUnit
from .slot_views import StreamedUnit

STAGED = 8
"""Experts that are read at a time where they are cast on their way into the pool."""


COUNTED = 4
"""Switches of which it is counted what pools of other sizes would find: 80 microseconds a call."""


class Experts:
    """All switches of a model.

    Args:
        slots: of each switch's pool.
        advance: called before anything is handed to the device, as long as a pass's graph is not finished.
        eager: each router is waited for at its own switch, since the model evaluates inside its forward pass.

    Attributes:
        pooled: whether calls go to the pools; else the whole of a layer's experts is in place when it is called.
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
        self._device = device
        self._reader: Reader | None = None
        self._pending: tuple[PooledSwitch, mx.array] | None = None
        self._staging: Slot | None = None
        self._windows: Windows | None = None
        self._switches = [PooledSwitch(u, n, device) for u, n in zip(units, slots, strict=True)]
        for each in self._switches[:: max(1, len(units) // COUNTED)][:COUNTED]:
            each.ghosts = Ghosts(each.unit.switch.experts)
        for each in self._switches:
            swap(each.unit.switch.module, "Pooled", self._call(each))

    def bind(self, ring: Ring, units: Sequence[StreamedUnit]) -> None:
        """What is missing is read by this ring's reader; where all experts pass by, they do so through its slots."""
        self._reader = ring.reader
        self._windows = Windows(self._switches, units, ring)

    @property
    def slots(self) -> list[int]:
        """Of each switch's pool."""
        return [each.policy.slots for each in self._switches]

    def seen(self) -> tuple[int, list[int]] | None:
        """Uses that were counted, and those that pools of each of ``expert_curve.SHARES`` would have found."""
        ghosts = [each.ghosts for each in self._switches if each.ghosts is not None]
        if not ghosts:
            return None
        return sum(g.uses for g in ghosts), np.sum([g.hits for g in ghosts], axis=0).tolist()

    # Sweeps

    def begin(self, tokens: int | None) -> bool:
        """A sweep over so many tokens begins (None: many); returns whether it goes to the pools."""
        self._pending = None
        shapes = [(s.unit.switch.experts, s.unit.used, s.policy.slots) for s in self._switches]
        self.pooled = tokens is not None and pooled_sweep(tokens, shapes)
        if self._windows is not None:
            self._windows.begin()
        return self.pooled

    def abandon(self) -> None:
        """A sweep broke off."""
        self._pending = None
        if self._windows is not None:
            self._windows.begin()

    def done(self, lease: Lease) -> None:
        """A unit of the ring is computed, and its slot still holds it."""
        if self._windows is not None and not self.pooled:
            self._windows.done(lease)

    def _call(self, switch: PooledSwitch) -> Call:
        def call(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            x, indices, rest = _taken(args, kwargs)
            if not self.pooled:
                if self._windows is not None:
                    self._windows.route(switch, indices)
                return original(*args, **kwargs)
            self.settle()
            # What was computed with this pool before reads its table, and its slots.
            mx.eval(switch.last)
            switch.last = []
            if self._eager or min(indices.size, switch.unit.switch.experts) > switch.policy.slots:
                return self._at_once(switch, original, x, indices, rest)
            self._advance()
            mx.async_eval(indices)
            with switch.in_place():
                out = original(x, switch.table[indices], **rest)
            self._pending = (switch, indices)
            switch.last = arrays_in(out)
            return out

        return call

    def settle(self) -> None:
        """The experts of the last switch that was called are in its pool when this returns.

        Raises:
            ReadError: an expert cannot be read (named).
        """
        if self._pending is None:
            return
        (switch, indices), self._pending = self._pending, None
        tokens = _by_token(indices)
        check()
        for group in switch.policy.groups(switch.use(tokens)):
            self._bring(switch, group.loads)
            self._count(len(group.experts), len(group.loads))

    def _at_once(
        self, switch: PooledSwitch, original: Callable[..., Any], x: mx.array, indices: mx.array, rest: dict[str, Any]
    ) -> mx.array:
        """A call whose experts are known before its graph is built; in groups, if there are more than slots.

        Each group is computed for all tokens, as the whole would be, so that kernels are the same; what used experts of
        another group is thrown away.
        """
        self._advance()
        tokens = _by_token(indices)
        check()
        numbers = tokens.reshape(indices.shape)
        out: mx.array | None = None
        for group in switch.policy.groups(switch.use(tokens)):
            self._bring(switch, group.loads)
            self._count(len(group.experts), len(group.loads))
            with switch.in_place():
                now = original(x, switch.table[indices], **rest)
            if out is not None:
                mine = mx.array(np.isin(numbers, group.experts))
                now = mx.where(mine.reshape(*mine.shape, *(1,) * (now.ndim - mine.ndim)), now, out)
            mx.eval(now)
            out = now
        assert out is not None
        return out

    # What is read

    def _bring(self, switch: PooledSwitch, loads: Sequence[Load]) -> None:
        """Read these experts into their slots, all at once."""
        if not loads:
            return
        for read in switch.filling:
            read.ended()
        switch.filling = []
        # Until all of it is there nothing is: what breaks off must not be taken for an expert.
        switch.policy.vacate([slot for _, slot in loads])
        if switch.unit.cast:
            for n in range(0, len(loads), STAGED):
                self._stage(switch, loads[n : n + STAGED])
        else:
            extents = ((expert, switch.pool.extents(expert, slot)) for expert, slot in loads)
            self._read(switch, extents, switch.pool.memory.payload)
        switch.place(loads)

    def _read(self, switch: PooledSwitch, experts: Iterable[tuple[int, list[Extent]]], target: memoryview) -> None:
        assert self._reader is not None
        began = self.metrics.clock()
        reads = [self._reader.submit(f"{switch.unit.name}, expert {e}", extents, target) for e, extents in experts]
        try:
            for read in reads:
                read.ended()
        except BaseException:
            for read in reads:
                read.cancel()
            for read in reads:
                read.wait_quietly()
            raise
        finally:
            self.metrics.stall_s += self.metrics.clock() - began
        for read in reads:
            read.wait()

    def _stage(self, switch: PooledSwitch, loads: Sequence[Load]) -> None:
        """The same by way of a slot, where experts are held in another dtype than on disk."""
        tensors = switch.unit.tensors
        starts, at = [], 0
        for t in tensors:
            starts.append(at)
            at += round_up(t.read_bytes * STAGED, BLOCK)
        slot = self._staged(at)
        extents = (
            (
                expert,
                [
                    Extent(t.info.file, t.info.offset + expert * t.read_bytes, t.read_bytes, start + n * t.read_bytes)
                    for t, start in zip(tensors, starts, strict=True)
                ],
            )
            for n, (expert, _) in enumerate(loads)
        )
        self._read(switch, extents, slot.payload)
        for i, (t, start) in enumerate(zip(tensors, starts, strict=True)):
            begin = slot.base + start
            raw = slot.array[begin : begin + len(loads) * t.read_bytes].view(DTYPES[t.info.dtype])
            cast = np.array((raw if t.dtype is None else raw.astype(t.dtype)).view(mx.uint8), copy=False).data
            for n, (_, place) in enumerate(loads):
                switch.pool.place(i, place)[:] = cast[n * t.held_bytes : (n + 1) * t.held_bytes]

    def _staged(self, nbytes: int) -> Slot:
        if self._staging is None or len(self._staging.payload) < nbytes:
            self._staging = None
            self._staging = Slot(nbytes, self._device)
        return self._staging

    def _count(self, used: int, missing: int) -> None:
        self.metrics.experts_used += used
        self.metrics.experts_read += missing

    # Memory

    def resize(self, slots: Sequence[int]) -> None:
        """Between sweeps: pools of other sizes. The most valuable experts stay; one layer's pool at a time is there
        twice."""
        self._pending = None
        for switch, count in zip(self._switches, slots, strict=True):
            switch.resize(count)
        mx.clear_cache()

    def close(self) -> None:
        """Give the switches their own classes back, and the memory."""
        if self._windows is not None:
            self._windows.close()
        for switch in self._switches:
            unswap(switch.unit.switch.module)
        self._switches, self._staging, self._pending, self._windows = [], None, None, None


def _taken(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[mx.array, mx.array, dict[str, Any]]:
    """The hidden states and the numbers of experts that a switch is called with, and what else."""
    rest = dict(kwargs)
    values = list(args)
    for name in ("x", "indices")[len(values) :]:
        values.append(rest.pop(name))
    return values[0], values[1], rest


def _by_token(indices: mx.array) -> npt.NDArray[np.int64]:
    """The experts of each token, in order; (tokens, experts of one). Waits for them."""
    return np.array(indices).astype(np.int64).reshape(-1, indices.shape[-1])
