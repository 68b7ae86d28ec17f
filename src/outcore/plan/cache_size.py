"""Bytes of KV caches and recurrent states, for one sequence or several that share forward passes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from ..sizes import BLOCK, KV_STEP, Growing, held_bytes, round_up, slot_bytes

# Tokens by which caches of changing batches grow. With mlx-lm's step, 32 short sequences of an 8B model would take 1 GB
# more, in place of layers.
SHARED_STEP = 32

# Recurrent states in memory at once, in addition to those of a chunk's tokens.
STATES = 4

# Copies of one layer's caches in memory while caches grow: a full buffer is copied into a larger one, and so is a
# buffer that a chunk writes while the previous one is still in use. Measured on the CPU device after prompts of 2,048
# tokens: 0.2 to 1.0 times a layer's keys and values; with KV offload 1.7 times, next to slots and pending writes. Plans
# for a GPU assume the same.
COPIED, COPIED_ELSEWHERE = 1.0, 1.75

# Slots of KV offload: one layer computes while the next layer's keys and values are read.
KV_SLOTS = 2

# No limit to the tokens of prompts that share a reading of the weights.
ALL = 2**62

# Copies of one layer's caches next to the old ones while sequences join (``BatchKVCache.extend`` pads, then
# concatenates) or leave.
MERGED = 2


@dataclass(frozen=True, kw_only=True)
class Texts:
    """The texts that memory is planned for. Lengths are in tokens.

    Attributes:
        context: most tokens of one sequence; ``prompt``: tokens of the longest prompt, at most ``context``.
        drafted: most drafted tokens whose logits a pass computes.
        sequences: how many sequences share each pass; ``cache``, ``context`` and ``prompt`` are those of one sequence.
        shared: tokens of all sequences together, each counted as long as the longest, since caches are padded to it; 0:
            ``context`` for each.
        joining: most prompt tokens computed in one pass; 0: those of the longest prompt.
        reading: most tokens of prompts that share a reading of the weights, if one chunk has fewer.
        step: tokens by which the caches of several sequences grow at a time.
        kv_disk: KV offload: ``off``, ``on``, or ``auto``: if the context does not fit otherwise.
        on_disk: whether keys and values of streamed layers are offloaded.
    """

    context: int
    prompt: int
    drafted: int = 0
    sequences: int = 1
    shared: int = 0
    joining: int = 0
    reading: int = ALL
    step: int = KV_STEP
    kv_disk: str = "off"
    on_disk: bool = False

    @property
    def room(self) -> int:
        """Tokens of context of all sequences together."""
        return self.shared or self.sequences * self.context


@dataclass(frozen=True, kw_only=True)
class CacheSize(Texts):
    """Bytes of these texts' caches.

    Attributes:
        cache: KV and recurrent states of one sequence for the whole context.
        growing: for each cache that grows with the context, bytes per token and most tokens (None: unlimited).
        fixed: the largest cache that does not grow.
        kept: copies of caches from before a pass, restored if it fails.
        copied: how many copies of the largest growing cache are in memory, besides it, while caches grow.
        kept_apart: layer and bytes per token of each cache that can be offloaded with its layer.
    """

    cache: int
    growing: tuple[Growing, ...] = ()
    fixed: int = 0
    kept: int = 0
    copied: float = COPIED
    kept_apart: tuple[tuple[int, int], ...] = ()

    def caches(self, share: float) -> int:
        """Returns bytes of all sequences' caches, including copies made while they grow or merge.

        Args:
            share: fraction of the layers that is computed without a wait; their recurrent states are in memory twice.
                Used for several sequences only.
        """
        if self.on_disk:
            return self._with_offload
        if self.sequences == 1:
            return self._alone
        fixed = self.sequences * max(0, self.states)
        largest = max([*self._merged, self.sequences * self.fixed])
        return int((1 + share) * fixed) + sum(self._merged) + MERGED * largest

    @cached_property
    def _alone(self) -> int:
        return self.cache + int(self.copied * self._largest(self.growing))

    def _largest(self, growing: Iterable[Growing]) -> int:
        return max((held_bytes([g], self.context) for g in set(growing)), default=0)

    def kv(self, layer: int) -> int:
        """Returns bytes of a layer's keys and values that can be offloaded, for the whole context."""
        return held_bytes([(self._kept_apart.get(layer, 0), None)], self.context)

    @cached_property
    def _kept_apart(self) -> dict[int, int]:
        found: dict[int, int] = {}
        for i, each in self.kept_apart:
            found[i] = found.get(i, 0) + each
        return found

    def kv_read(self, layer: int, tokens: int | None = None) -> int:
        """Returns bytes of offloaded KV that one layer reads per pass after ``tokens`` (default: the context)."""
        context = self.context if tokens is None else tokens
        whole = context // KV_STEP * KV_STEP  # the last tokens do not fill a block and stay in memory
        return self._kept_apart.get(layer, 0) * whole if self.on_disk else 0

    @cached_property
    def kv_slot(self) -> int:
        """Bytes of a slot for one layer's keys and values; 0 without KV offload."""
        largest = max((self.kv(i) for i, _ in self.kept_apart), default=0)
        return round_up(largest, BLOCK) + BLOCK * 8 if self.on_disk else 0

    @cached_property
    def _with_offload(self) -> int:
        """Bytes in memory with KV offload: other caches, slots, each layer's last tokens, one layer not yet written,
        and the copy made when the largest cache grows."""
        growing = list(self.growing)
        for _, each in self.kept_apart:
            growing.remove((each, None))
        largest = self._largest(growing)
        layers = max((self.kv(i) for i, _ in self.kept_apart), default=0)
        tails = KV_STEP * sum(each for _, each in self.kept_apart)
        moving = KV_SLOTS * slot_bytes(self.kv_slot) + layers + int(COPIED_ELSEWHERE * max(layers, largest))
        return self.states + held_bytes(growing, self.context) + tails + moving

    @property
    def _merged(self) -> list[int]:
        # Caches that were padded or cut grow by whole steps from any length.
        tokens = self.room + self.sequences * self.step
        return [each * min(tokens, self.sequences * most if most else tokens) for each, most in self.growing]

    @cached_property
    def states(self) -> int:
        """Bytes of recurrent states: caches that do not grow with the context."""
        return self.cache - held_bytes(self.growing, self.context)
