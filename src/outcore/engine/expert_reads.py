"""Experts on their way from files into pools."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import mlx.core as mx
import numpy as np

from ..checkpoint.lazy_model import DTYPES
from ..disk.layout import Extent
from ..disk.metrics import Metrics
from ..disk.reader import Read, Reader
from ..disk.ring import Slot
from ..plan.expert_policy import Load
from ..sizes import BLOCK, round_up
from .pooled_switch import PooledSwitch

STAGED = 8
"""Experts that are read at a time where they are cast on their way into the pool."""


class ExpertReads:
    """Reads for the pools of a model.

    Args:
        device: of the slot that experts are cast in.

    Attributes:
        reader: whose threads read; None: not known yet.
        expert_s: seconds that an expert took, of those that were waited for lately; None: none was.
    """

    def __init__(self, metrics: Metrics, device: str) -> None:
        self.reader: Reader | None = None
        self.expert_s: float | None = None
        self._metrics = metrics
        self._device = device
        self._staging: Slot | None = None

    def bring(self, switch: PooledSwitch, loads: Sequence[Load], wanted: Iterable[int] = ()) -> None:
        """These experts are in their slots when this returns, and those that are ``wanted`` and were foreseen are, too.

        Raises:
            ReadError: one cannot be read (named).
        """
        began = self._metrics.clock()
        if loads:
            self._empty(switch, loads)
            if switch.unit.cast:
                for n in range(0, len(loads), STAGED):
                    self._stage(switch, loads[n : n + STAGED])
            else:
                self._read([self._begin(switch, load) for load in loads])
            switch.place(loads)
            self._took(self._metrics.clock() - began, len(loads))
        foreseen = [(e, int(switch.policy.slot_of[e])) for e in wanted if e in switch.arriving]
        if foreseen:
            switch.arrived([e for e, _ in foreseen])
            lost = [(e, slot) for e, slot in foreseen if switch.policy.slot_of[e] < 0]
            if lost:
                self.bring(switch, lost)
        if loads or foreseen:
            self._metrics.stall_s += self._metrics.clock() - began

    def foresee(self, switch: PooledSwitch, loads: Sequence[Load]) -> None:
        """Begin to read these experts, which may never be asked for, and return at once."""
        mx.eval(switch.last)
        switch.last = []
        self._empty(switch, loads)
        for load in loads:
            switch.arriving[load[0]] = self._begin(switch, load)
        switch.place(loads)

    def _empty(self, switch: PooledSwitch, loads: Sequence[Load]) -> None:
        """Nothing is in the slots of these loads, and nothing writes to them, or reads them."""
        switch.free()
        leaving = {int(switch.policy.expert_in[slot]) for _, slot in loads}
        switch.arrived(leaving, cancel=True)
        # Until all of it is there nothing is: what breaks off must not be taken for an expert.
        switch.policy.vacate([slot for _, slot in loads])

    def _begin(self, switch: PooledSwitch, load: Load) -> Read:
        return self._submit(switch, load[0], switch.pool.extents(*load), switch.pool.memory.payload)

    def _submit(self, switch: PooledSwitch, expert: int, extents: Sequence[Extent], target: memoryview) -> Read:
        assert self.reader is not None
        return self.reader.submit(f"{switch.unit.name}, expert {expert}", extents, target)

    def _read(self, reads: Sequence[Read]) -> None:
        try:
            for read in reads:
                read.ended()
        except BaseException:
            for read in reads:
                read.cancel()
            for read in reads:
                read.wait_quietly()
            raise
        for read in reads:
            read.wait()

    def _took(self, seconds: float, experts: int) -> None:
        each = seconds / experts
        self.expert_s = each if self.expert_s is None else self.expert_s + (each - self.expert_s) / 16

    def _stage(self, switch: PooledSwitch, loads: Sequence[Load]) -> None:
        """Read by way of a slot, where experts are held in another dtype than on disk."""
        tensors = switch.unit.tensors
        starts, at = [], 0
        for t in tensors:
            starts.append(at)
            at += round_up(t.read_bytes * STAGED, BLOCK)
        slot = self._staged(at)
        reads = []
        for n, (expert, _) in enumerate(loads):
            extents = [
                Extent(t.info.file, t.info.offset + expert * t.read_bytes, t.read_bytes, start + n * t.read_bytes)
                for t, start in zip(tensors, starts, strict=True)
            ]
            reads.append(self._submit(switch, expert, extents, slot.payload))
        self._read(reads)
        for i, (t, start) in enumerate(zip(tensors, starts, strict=True)):
            begin = slot.base + start
            raw = slot.array[begin : begin + len(loads) * t.read_bytes].view(DTYPES[t.info.dtype])
            cast = np.array((raw if t.dtype is None else raw.astype(t.dtype)).view(mx.uint8), copy=False).data
            for n, (_, place) in enumerate(loads):
                switch.pool.move(switch.pool.place(i, place), cast[n * t.held_bytes : (n + 1) * t.held_bytes])

    def _staged(self, nbytes: int) -> Slot:
        if self._staging is None or len(self._staging.payload) < nbytes:
            self._staging = None
            self._staging = Slot(nbytes, self._device)
        return self._staging
