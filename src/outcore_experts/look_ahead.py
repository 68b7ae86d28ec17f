"""Experts that the next layer will ask for, read while this one is computed.

A layer changes its hidden states by little, so the next layer's router, given what this layer's experts are given,
names most of those that it will ask for (.78 of them, ``py-qwen35moe-30m``). They are read as long as the disk has
nothing else to do: between one layer's experts and the next one's. What was foreseen in vain costs a place of the
pool and nothing else, if no more is read than fits in there.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import mlx.core as mx

from outcore.disk.metrics import Metrics

from .expert_cache import ExpertReads, PooledSwitch

MOST = 4
"""Experts that are foreseen for a layer, at most."""

WORTH = 0.1
"""Nothing is foreseen where less than this share of the time goes by waiting for the disk."""

RECENT = 32
"""Calls of switches over which times are averaged."""

CYCLE, TRIED, RUN = 512, 64, 16
"""Sweeps after which it is tried anew whether foreseeing is of any use, sweeps that this takes, and how many of them
in a row foresee, or do not: a limit of bytes a second lets much through at a time, and then nothing for a tenth of a
second. The first one of each run does not count."""

GAIN = 0.98
"""Foreseeing is of use where a sweep takes at most this share of the time. It is not where bytes are all that counts,
so that what is read in vain is not read in idle time: behind a limit of bytes a second it costs 12 %."""


class Routed(Exception):
    """Ends a block's call where it calls its switch: its router has been asked."""

    def __init__(self, indices: mx.array) -> None:
        self.indices = indices


class LookAhead:
    """Of all switches of a model, in the order in which they are called.

    Attributes:
        asking: a block is called for what its router says, and nothing else.
    """

    def __init__(self, switches: Sequence[PooledSwitch], reads: ExpertReads, metrics: Metrics) -> None:
        self.asking = False
        self._next = {id(a): b for a, b in itertools.pairwise(switches)}
        self._reads = reads
        self._metrics = metrics
        self._foreseen: dict[int, set[int]] = {}  # of the switches whose call comes next, by id
        self._idle: float | None = None  # seconds in which the disk has nothing to do, a layer
        self._stall = 0.0  # seconds that a layer waits for the disk
        self._since: float | None = None
        self._routed = 0.0
        self._credit = 0.0  # experts that could have been read in that time
        self._sweep = 0  # of a cycle
        self._on = True
        self._spent, self._calls = 0.0, 0  # seconds of this sweep's calls
        # Seconds and calls of sweeps that foresaw, and of those that did not; what was long ago counts less.
        self._took = {True: [0.0, 0.0], False: [0.0, 0.0]}

    def begin(self) -> None:
        """A sweep begins."""
        self._since = None
        self._foreseen = {}
        if not self._calls:
            return
        if self._sweep < TRIED and self._sweep % RUN:
            took = self._took[self._on]
            took[0], took[1] = took[0] + self._spent, took[1] + self._calls
        self._spent, self._calls = 0.0, 0
        self._sweep = (self._sweep + 1) % CYCLE
        if self._sweep < TRIED:
            self._on = self._sweep // RUN % 2 == 0
        elif self._sweep == TRIED:
            on, off = (seconds / calls for seconds, calls in (self._took[True], self._took[False]))
            self._on = on <= GAIN * off
            self._took = {which: [seconds / 2, calls / 2] for which, (seconds, calls) in self._took.items()}

    def ask(self, switch: PooledSwitch, x: mx.array) -> mx.array | None:
        """Numbers of the experts that the next layer's router would choose for what this layer's are given; not
        evaluated. None: it is not worth asking, or it cannot be asked."""
        after = self._next.get(id(switch))
        if not self._on or after is None or after.unit.block is None or after.unit.cast or after.policy.complete:
            return None
        if self._credit < 1 or self._idle is None or self._stall < WORTH * (self._stall + self._idle):
            return None
        self.asking = True
        try:
            after.unit.block(x)
        except Routed as routed:
            return routed.indices
        except (TypeError, ValueError, AttributeError, IndexError):
            # It is called in another way, or its experts are given something else.
            del self._next[id(switch)]
        finally:
            self.asking = False
        return None

    def routed(self, switch: PooledSwitch, wanted: set[int]) -> None:
        """A switch's call uses these experts, as is known now."""
        now = self._routed = self._metrics.clock()
        if self._since is not None:
            idle = now - self._since
            self._spent += idle
            self._idle = idle if self._idle is None else self._idle + (idle - self._idle) / RECENT
            each = self._reads.expert_s
            # Nothing was ever waited for: then there is nothing to foresee either.
            self._credit = min(MOST, self._credit + (self._idle / each if each else 0.0))
        foreseen = self._foreseen.pop(id(switch), None)
        if foreseen is None:
            return
        self._metrics.experts.wasted += len(foreseen - wanted)

    def foresee(self, switch: PooledSwitch, likely: set[int]) -> None:
        """Begin to read what the switch after this one will likely use, as far as there is time for it."""
        after = self._next[id(switch)]
        policy, scores = after.policy, after.policy.scores
        missing = sorted((e for e in likely if policy.slot_of[e] < 0), key=lambda e: (-scores[e], e))
        missing = missing[: int(self._credit)]
        # What is likely stays, and so does what is on its way.
        spare = policy.spare({*likely, *after.arriving}, len(missing))
        loads = list(zip(missing, spare, strict=False))
        if loads:
            self._credit -= len(loads)
            self._foreseen[id(after)] = {e for e, _ in loads}
            self._metrics.experts.foreseen += len(loads)
            self._reads.foresee(after, loads)

    def read(self) -> None:
        """A switch's experts are there: from now on the disk has nothing to do."""
        self._since = self._metrics.clock()
        stall = self._since - self._routed
        self._spent, self._calls = self._spent + stall, self._calls + 1
        self._stall += (stall - self._stall) / RECENT
