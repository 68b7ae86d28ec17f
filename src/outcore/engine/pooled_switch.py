"""A layer's switch that computes with a pool of experts: the pool, its policy, and the table of which lies where."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from ..disk.reader import Read
from ..machine.device_memory import DeviceMemory
from ..modules.hooks import absent, put
from ..modules.layers import Parameter
from ..modules.switches import Switch
from ..plan.expert_policy import ExpertPolicy, Load
from .expert_pool import Pool, Stacked


@dataclass(frozen=True)
class SwitchUnit:
    """A layer's switch and where its experts lie.

    Attributes:
        name: of its layer, for messages.
        parameters: whose values are taken from a pool, in the order of ``tensors``.
        used: experts that a token uses.
        block: the module that routes, and calls the switch; None: it cannot be called by itself.
    """

    name: str
    switch: Switch
    parameters: tuple[Parameter, ...]
    tensors: tuple[Stacked, ...]
    used: int
    block: nn.Module | None = None

    @property
    def cast(self) -> bool:
        """Whether experts are held in another dtype than on disk."""
        return any(t.dtype is not None for t in self.tensors)


class PooledSwitch:
    """One switch.

    Args:
        table: memory for the table; ``inside``: for the expert in each slot, uint32 (experts,) both.
        placed: as in ``Pool``.

    Attributes:
        table: the slot of each expert; of one that is not in the pool, any.
        last: what was computed with the pool last, and may still be under way.
        filling: reads that copy experts out of the pool, and may still be under way.
        arriving: experts that were foreseen, and have slots, and may not be there yet.
        stays: all experts are in memory, and the pool's arrays are the switch's weights.
    """

    def __init__(
        self,
        unit: SwitchUnit,
        slots: int,
        table: mx.array,
        inside: mx.array,
        device: str,
        placed: DeviceMemory | None = None,
    ) -> None:
        self.unit = unit
        self.last: list[mx.array] = []
        self.filling: list[Read] = []
        self.arriving: dict[int, Read] = {}
        self._device, self._placed = device, placed
        self.policy = ExpertPolicy(unit.switch.experts, slots)
        self.pool = Pool(unit.tensors, slots, device, placed)
        self.table = table
        self.stays = False
        self._absent = absent(self.pool.arrays)
        self._inside = inside
        # What is in memory as a whole, by expert, while something else is in its place.
        self._own: list[mx.array] | None = None
        mx.eval(table, inside)
        self._slots, self._experts = np.array(table, copy=False), np.array(inside, copy=False)

    def use(self, tokens: npt.NDArray[np.int64]) -> set[int]:
        """Tokens, in order, use these experts, (tokens, experts of one). Returns each once."""
        self.policy.used(tokens)
        return set(tokens.ravel().tolist())

    def free(self) -> None:
        """Wait until nothing copies out of the pool."""
        for read in self.filling:
            read.ended()
        self.filling = []

    def settle(self) -> None:
        """Wait until nothing computes with the pool, or copies out of it, or into it."""
        mx.eval(self.last)
        self.last = []
        self.free()
        self.arrived(self.arriving)

    def arrived(self, experts: Iterable[int], *, cancel: bool = False) -> None:
        """Wait for those of these that were foreseen; what did not come is not there.

        Args:
            cancel: nobody wants them: reads that have not begun do not.
        """
        mine = [(e, self.arriving[e]) for e in list(experts) if e in self.arriving]
        for _, read in mine:
            if cancel:
                read.cancel()
        for e, read in mine:
            read.ended()
            del self.arriving[e]
            if read.error is not None:
                self.policy.vacate([int(self.policy.slot_of[e])])

    def place(self, loads: Sequence[Load]) -> None:
        """These experts are in these slots now."""
        self.policy.placed(loads)
        self._slots[:] = np.maximum(self.policy.slot_of, 0)
        self._experts[: self.policy.slots] = np.maximum(self.policy.expert_in, 0)

    def withdraw(self) -> None:
        """Nothing is in place of the switch's weights."""
        self.stays = False
        put(self.unit.parameters, self._absent)
        if self._own is not None:
            put(self.unit.switch.held, self._own)
            self._own = None

    def stay(self) -> None:
        """All of its experts are in memory: calls are the layer's own, until ``withdrawn``."""
        if not self.stays:
            put(self.unit.parameters, self.pool.arrays)
            self.stays = True

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """The pool's arrays are the switch's weights; what stays in memory by expert is looked up for the slots when
        the graph is computed, as the table is: which experts they hold then is not known yet."""
        self._own = [p.array for p in self.unit.switch.held]
        experts = self._inside[: self.policy.slots]
        try:
            put(self.unit.parameters, self.pool.arrays)
            put(self.unit.switch.held, [own[experts] for own in self._own])
            yield
        finally:
            self.withdraw()

    def resize(self, slots: int) -> None:
        """Another pool, with the most valuable experts of this one."""
        if slots == self.policy.slots:
            return
        self.settle()
        if self.stays:
            self.withdraw()
        policy, moves = self.policy.resized(slots)
        pool = Pool(self.unit.tensors, slots, self._device, self._placed)
        pool.copy(self.pool, [(int(self.policy.slot_of[expert]), slot) for expert, slot in moves])
        self.pool.close()
        self.policy, self.pool = policy, pool
        self.place(moves)
