"""Bytes of caches for a text, or for several that share passes: they grow with the context, as mlx-lm's grow, in steps
and up to a window."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from ..sizes import BLOCK, KV_STEP, Growing, held_bytes, round_up, slot_bytes

SHARED_STEP = 32
"""Tokens by which caches grow of sequences that come and go: 32 short ones of an 8B model would take 1 GB more by
mlx-lm's step, in place of layers."""

STATES = 4
"""Recurrent states that are under way at once beside those of a chunk's tokens."""

COPIED, COPIED_ELSEWHERE = 1.0, 1.75
"""Copies of one layer's caches that are there beside the others: a buffer that has no room left is copied into a larger
one, and what a chunk is written into while the one before is held is copied as well. After prompts of 2,048 tokens on
the CPU device, peaks were the caches, scores, inputs and 0.2 to 1.0 layers' keys and values in memory; with those on
disk 1.7, beside slots and what is being written. A GPU's plans count as many as that."""

KV_SLOTS = 2
"""Slots for keys and values that lie on disk: one layer's is computed with while the next one's is read."""

MERGED = 2
"""Copies of one layer's caches that are there beside the old ones while sequences join (``BatchKVCache.extend`` pads,
then concatenates) or leave."""


@dataclass(frozen=True, kw_only=True)
class Texts:
    """What a model is to compute. Tokens.

    Attributes:
        context: of one sequence. ``prompt``: of the longest prompt, at most ``context``.
        drafted: whose logits a sweep computes beside its own at most: those of a draft.
        sequences: that share each sweep; ``cache``, ``context`` and ``prompt`` are those of one.
        shared: of context that all sequences together have room for, counted as if each were as long as the longest,
            since caches are padded to it; 0: the whole context for each.
        joining: of the prompts that may be computed in one sweep; 0: those of the longest prompt.
        step: by which several sequences' caches grow.
        kv_disk: ``off``, ``on``, or ``auto``: keys and values lie on disk where a context does not fit otherwise.
        on_disk: they do, but for those of resident layers.
    """

    context: int
    prompt: int
    drafted: int = 0
    sequences: int = 1
    shared: int = 0
    joining: int = 0
    step: int = KV_STEP
    kv_disk: str = "off"
    on_disk: bool = False

    @property
    def room(self) -> int:
        """Tokens of context that all sequences together have room for."""
        return self.shared or self.sequences * self.context


@dataclass(frozen=True, kw_only=True)
class CacheSize(Texts):
    """What the caches of these texts take. Bytes, per token where said.

    Attributes:
        cache: KV and recurrent states for the whole context; ``growing``: for each cache that grows with it, bytes
            per token and tokens at most (None: no limit).
        fixed: the largest cache that does not grow with the context.
        kept: caches that are there as they were before a sweep too, to go back to if it fails.
        copied: copies of the largest cache that growing takes beside it, in memory.
        kept_apart: of each cache that can lie on disk with its layer, the layer and bytes per token.
    """

    cache: int
    growing: tuple[Growing, ...] = ()
    fixed: int = 0
    kept: int = 0
    copied: float = COPIED
    kept_apart: tuple[tuple[int, int], ...] = ()

    def caches(self, share: float) -> int:
        """Bytes of all sequences' caches, and of what growing or merging them takes.

        Args:
            share: of the layers that are under way at once, from one streamed layer to the next: recurrent states are
                there as before and as after them.
        """
        if self.on_disk:
            return self._beside_disk
        if self.sequences == 1:
            return self._alone
        fixed = self.sequences * max(0, self.states)
        largest = max([*self._merged, self.sequences * self.fixed])
        return int((1 + share) * fixed) + sum(self._merged) + MERGED * largest

    @cached_property
    def _alone(self) -> int:
        return self.cache + int(self.copied * self._largest(self.growing))

    def _largest(self, growing: Iterable[Growing]) -> int:
        """Bytes of the largest of some caches that grow, for the whole context."""
        return max((held_bytes([g], self.context) for g in set(growing)), default=0)

    def kv(self, layer: int) -> int:
        """Bytes of a layer's keys and values for the whole context that could lie on disk."""
        return held_bytes([(self._kept_apart.get(layer, 0), None)], self.context)

    @cached_property
    def _kept_apart(self) -> dict[int, int]:
        """Bytes per token of what could lie on disk, by layer."""
        found: dict[int, int] = {}
        for i, each in self.kept_apart:
            found[i] = found.get(i, 0) + each
        return found

    def kv_read(self, layer: int, tokens: int | None = None) -> int:
        """Bytes of them that a sweep reads after so many tokens, the whole context by default, where they do."""
        context = self.context if tokens is None else tokens
        whole = context // KV_STEP * KV_STEP  # of the rest there are no whole blocks yet
        return self._kept_apart.get(layer, 0) * whole if self.on_disk else 0

    @cached_property
    def kv_slot(self) -> int:
        """Bytes of a slot for one layer's keys and values; 0: they stay in memory."""
        largest = max((self.kv(i) for i, _ in self.kept_apart), default=0)
        return round_up(largest, BLOCK) + BLOCK * 8 if self.on_disk else 0

    @cached_property
    def _beside_disk(self) -> int:
        """Bytes of the caches that stay in memory, and of what goes to and comes from the disk: slots, the last tokens
        of each, one layer's before it is put away, and what growing the largest takes."""
        growing = list(self.growing)
        for _, each in self.kept_apart:
            growing.remove((each, None))
        largest = self._largest(growing)
        layers = max((self.kv(i) for i, _ in self.kept_apart), default=0)
        tails = KV_STEP * sum(each for _, each in self.kept_apart)
        moving = KV_SLOTS * slot_bytes(self.kv_slot) + layers + int(COPIED_ELSEWHERE * max(layers, largest))
        return self.states + held_bytes(growing, self.context) + tails + moving

    @property
    def ahead(self) -> int:
        """Bytes of several sequences' states and caches that MLX may take beyond its memory limit, which it looks at
        once in ten operations; 0 for one sequence."""
        if self.sequences == 1:
            return 0
        return max([STATES * self.sequences * self.fixed, *(MERGED * n for n in self._merged)])

    @property
    def _merged(self) -> list[int]:
        # Caches that were padded or cut grow by whole steps from any length.
        tokens = self.room + self.sequences * self.step
        return [each * min(tokens, self.sequences * most if most else tokens) for each, most in self.growing]

    @cached_property
    def states(self) -> int:
        """Bytes of what does not grow with the context: recurrent states, which drafts are taken back to."""
        return self.cache - held_bytes(self.growing, self.context)
