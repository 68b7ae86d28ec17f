"""Prefetches the experts of the next layer while this one is computed.

A layer changes its hidden states little, so the next layer's router, called with the input of this layer's experts,
chooses most of the experts that it will choose later (.78 of them, ``py-qwen35moe-30m``). These are read while the disk
is idle: after one layer's experts have arrived and before the next layer's are known. A wrong prediction costs only a
slot of the cache, as long as the reads fit into that time.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import mlx.core as mx

from outcore.disk.metrics import Metrics

from .expert_cache import CachedSwitch, ExpertReads

MOST = 4
# Experts are prefetched only if at least this fraction of the time is spent waiting for the disk.
WORTH = 0.1

# Number of switch calls over which times are averaged.
RECENT = 32

# Every CYCLE passes prefetching is compared with not prefetching. The comparison takes TRIED passes, in runs of RUN
# passes with and without in turn: a limit of bytes a second lets much through at once, and then nothing for a tenth
# of a second. The first pass of each run does not count.
CYCLE, TRIED, RUN = 512, 64, 16

# Prefetching stays on if passes with it take at most this fraction of the time without. If the disk is limited to a
# number of bytes a second, prefetching costs 12 %, as the reads of wrong predictions delay others.
GAIN = 0.98


class Routed(Exception):
    """Raised by a switch while ``predicting``: ends the block's call and carries the router's choice."""

    def __init__(self, indices: mx.array) -> None:
        self.indices = indices


class ExpertPrefetch:
    """Prefetches for all switches of a model, which are given in call order. While ``predicting``, a block is called
    only for its router's choice."""

    def __init__(self, switches: Sequence[CachedSwitch], reads: ExpertReads, metrics: Metrics) -> None:
        self.predicting = False
        self._next = {id(a): b for a, b in itertools.pairwise(switches)}
        self._reads = reads
        self._metrics = metrics
        self._prefetched: dict[int, set[int]] = {}  # prefetched experts, by the id of their switch
        self._idle: float | None = None  # mean seconds per layer in which the disk is idle
        self._stall = 0.0  # mean seconds per layer spent waiting for the disk
        self._since: float | None = None
        self._routed = 0.0
        self._credit = 0.0  # how many experts the disk can read in its idle time
        self._pass = 0  # pass number within a cycle
        self._on = True
        self._spent, self._calls = 0.0, 0  # seconds and calls of this pass
        # Seconds and calls of passes with (True) and without prefetching; older ones count less.
        self._took = {True: [0.0, 0.0], False: [0.0, 0.0]}

    def begin(self) -> None:
        self._since = None
        self._prefetched = {}
        if not self._calls:
            return
        if self._pass < TRIED and self._pass % RUN:
            took = self._took[self._on]
            took[0], took[1] = took[0] + self._spent, took[1] + self._calls
        self._spent, self._calls = 0.0, 0
        self._pass = (self._pass + 1) % CYCLE
        if self._pass < TRIED:
            self._on = self._pass // RUN % 2 == 0
        elif self._pass == TRIED:
            on, off = (seconds / calls for seconds, calls in (self._took[True], self._took[False]))
            self._on = on <= GAIN * off
            self._took = {which: [seconds / 2, calls / 2] for which, (seconds, calls) in self._took.items()}

    def predict(self, switch: CachedSwitch, x: mx.array) -> mx.array | None:
        """Returns the expert indices that the next layer's router chooses for this layer's input ``x``, not evaluated;
        None if prefetching does not pay or is not possible."""
        after = self._next.get(id(switch))
        if not self._on or after is None or after.unit.block is None or after.unit.cast or after.policy.complete:
            return None
        if self._credit < 1 or self._idle is None or self._stall < WORTH * (self._stall + self._idle):
            return None
        self.predicting = True
        try:
            after.unit.block(x)
        except Routed as routed:
            return routed.indices
        except (TypeError, ValueError, AttributeError, IndexError):
            # This model calls its blocks in another way, or gives its experts another input.
            del self._next[id(switch)]
        finally:
            self.predicting = False
        return None

    def routed(self, switch: CachedSwitch, wanted: set[int]) -> None:
        now = self._routed = self._metrics.clock()
        if self._since is not None:
            idle = now - self._since
            self._spent += idle
            self._idle = idle if self._idle is None else self._idle + (idle - self._idle) / RECENT
            each = self._reads.expert_s
            # Without a measured read time nothing is prefetched.
            self._credit = min(MOST, self._credit + (self._idle / each if each else 0.0))
        prefetched = self._prefetched.pop(id(switch), None)
        if prefetched is None:
            return
        self._metrics.experts.wasted += len(prefetched - wanted)

    def prefetch(self, switch: CachedSwitch, likely: set[int]) -> None:
        """Begins to read the experts that the next switch will likely use, as many as there is time for."""
        after = self._next[id(switch)]
        policy, scores = after.policy, after.policy.scores
        missing = sorted((e for e in likely if policy.slot_of[e] < 0), key=lambda e: (-scores[e], e))
        missing = missing[: int(self._credit)]
        # Likely and arriving experts keep their slots.
        spare = policy.spare({*likely, *after.arriving}, scores)
        loads = list(zip(missing, spare, strict=False))
        if loads:
            self._credit -= len(loads)
            self._prefetched[id(after)] = {e for e, _ in loads}
            self._metrics.experts.foreseen += len(loads)
            self._reads.prefetch(after, loads)

    def read(self) -> None:
        """Notes that a switch's experts have arrived: the disk is idle from now on."""
        self._since = self._metrics.clock()
        stall = self._since - self._routed
        self._spent, self._calls = self._spent + stall, self._calls + 1
        self._stall += (stall - self._stall) / RECENT
