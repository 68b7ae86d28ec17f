"""What a plan knows of a model: bytes of its layers, caches and activations, for a context and a number of sequences.
Numbers, no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ..disk.layout import BLOCK, most_unit, round_up, slot_bytes
from ..sizes import ARRAY_BYTES
from .context_bytes import KV_STEP, Growing, held_bytes
from .partition import LayerSize

STATES = 4
"""Recurrent states that are under way at once beside those of a chunk's tokens."""

LOGITS_COPIES = 6
"""Times that a token's logits are there while one is chosen by them."""

REST_BYTES, UNKNOWN_BYTES = 500_000, 2_000_000
"""Bytes. Tokens, sampling, masks and what else is allocated on the way; and where caches are of a class that is not
known, as a model's own code may have them. Of mlx-lm's tiny models none took more than is counted beside these (512
tokens, CPU device), but for the one with such caches, which took 0.7 MB more."""

UNDER_WAY_OPERATIONS = 10
"""Operations that MLX queues on the CPU device before it waits for the first, each with its memory (MAX_ACTIVE_TASKS,
transforms.cpp)."""

LOGITS_SHARE = 2
"""``ModelSize.logits`` counts six float32 arrays as wide as the vocabulary. Of several sequences there are three at
once: logits, the parts that they are put together from, log-probabilities (or the copy that logsumexp makes); the rest
is for one after the other."""

COPIED, COPIED_ELSEWHERE = 1.0, 1.75
"""Copies of one layer's caches that are there beside the others: a buffer that has no room left is copied into a larger
one, and what a chunk is written into while the one before is held is copied as well. After prompts of 2,048 tokens on
the CPU device, peaks were the caches, scores, inputs and 0.2 to 1.0 layers' keys and values in memory; with those on
disk 1.7, beside slots and what is being written. A GPU's plans count as many as that."""

KV_SLOTS = 2
"""Slots for keys and values that lie on disk: one layer's is computed with while the next one's is read."""

UNDER_WAY = 2
"""Layers whose codes are put together at once: the one that is computed and the one that is queued behind it. Where
many that stay in memory follow each other MLX would have more under way, and waits at its memory limit instead."""

MERGED = 2
"""Copies of one layer's caches that are there beside the old ones while sequences join (``BatchKVCache.extend`` pads,
then concatenates) or leave."""


REUSE_BYTES = 64_000_000
"""Of freed memory that is kept for reuse at most: enough for what a token needs. A miss costs a CPU or CUDA little."""

METAL_REUSE_BYTES = 256_000_000
"""The same on Metal, where a miss makes a buffer (``newBuffer``, metal/allocator.cpp) and, while memory is wired, has a
residency set committed. Never measured."""

GRAPH_BYTES = {"cpu": 64_000_000, "gpu": 256_000_000}
"""Bytes of MLX's graph that the passes of one sweep may take: memory of the process's own, which no budget counts. A
GPU computes small chunks so fast that another sweep would be felt."""


@dataclass(frozen=True)
class Graph:
    """What building a forward pass takes of the process's memory, in bytes, before any of it is computed.

    Measured with MLX 0.32.4 on Linux: about 1 kB for an operation, 100 to 150 kB for a layer; and where a recurrence is
    built token by token, 14 kB for each token and layer.

    Attributes:
        layers: of the model. ``recurrent``: of those, whose recurrences are built token by token.
        most: what all passes of a sweep may take together.
        versions, masked: what a pass holds for later layers, as ``ModelSize`` says; ``held``: bytes of it that all
            passes of a sweep may take together, of several.
    """

    layers: int
    recurrent: int = 0
    most: int = GRAPH_BYTES["gpu"]
    versions: int = 0
    masked: int = 0
    held: int = 0

    def sweeps(self, passes: Sequence[int], context: int = 0) -> list[int]:
        """Of passes of so many tokens each, how many share each sweep; at least one does.

        Args:
            context: tokens that caches hold after the last.
        """
        counts: list[int] = []
        left = held = 0
        context = max(0, context - sum(passes))
        for tokens in passes:
            context += tokens
            nbytes = 128_000 * self.layers + 14_000 * self.recurrent * tokens
            kept = held_for_later(self.versions, self.masked, tokens, context)
            # A rank of several may have no layer of its own, and a pass takes nothing then.
            if not counts or nbytes > left or kept > held:
                counts.append(0)
                left, held = self.most, max(self.held, kept)
            counts[-1] += 1
            left -= nbytes
            held -= kept
        return counts


def held_for_later(versions: int, masked: int, tokens: int, context: int) -> int:
    """Bytes that a pass over so many tokens holds for later layers, behind which caches hold ``context``."""
    return (context + KV_STEP) * versions + context * tokens * masked


@dataclass(frozen=True)
class ModelSize:
    """What a plan needs to know of a model. Bytes, per token where said.

    Attributes:
        non_layer: embeddings, norms, head, and every 1-D parameter; ``tables`` and ``head`` included.
        cache: KV and recurrent states for the whole context; ``growing``: for each cache that grows with it, bytes
            per token and tokens at most (None: no limit).
        token: activations per token of a chunk.
        hidden: a layer's input and output per token: those of a whole prompt are held while it is computed in chunks.
        drafted: tokens whose logits a sweep computes beside its own at most: those of a draft.
        between: hidden states, per token, that are there between two parts of a layer beside what its pieces put out:
            where layers are streamed in parts, those of a whole prompt.
        score: attention scores per token of a chunk and token of context.
        window: KV per token of a chunk that sliding windows keep beyond their size until the next token comes.
        state: a recurrent state, where a recurrence is computed token by token and keeps one for each.
        logits: one token's logits and what sampling makes of them.
        workspace: what the device's libraries keep for themselves.
        prompt: tokens of the longest prompt, at most ``context``.
        tables: embeddings that are only looked up in, so that rows of them can be read for the tokens at hand.
        head: what is multiplied with outside of layers (the head, tied embeddings), if it can be streamed in slices;
            ``slot`` is the smallest slice's; slices are as large as the slots. ``cast`` is that of all of it.
        rest_kind: the kind of all that is computed outside of layers.
        sequences: that share each sweep. ``cache``, ``context`` and ``prompt`` are those of one.
        shared: tokens of context that all sequences together have room for, counted as if each were as long as the
            longest, since caches are padded to it; 0: the whole context for each.
        joining: tokens of the prompts that may be computed in one sweep; 0: those of the longest prompt.
        step: tokens by which several sequences' caches grow.
        fixed: the largest cache that does not grow with the context.
        kept: bytes of caches that are there as they were before a sweep too, to go back to if it fails.
        batches: activations of whole batches that are evaluated in one call, beyond those of a prompt.
        recurrences: layers whose recurrences are built token by token.
        reuse: freed memory that MLX may keep for reuse at most.
        versions: keys and values that several layers use, per token of context: of each pass of a sweep they are there
            as they were then. ``masked``: masks, per token of a pass and token of context, of each pass too. Passes
            that hold more than the largest layer weighs do not share a sweep: else, in small chunks, they would take
            memory by the square of a prompt (gemma3n, 1,600 tokens: 45 MB beside 1.8 MB of caches).
        rest: what is allocated on the way and counted nowhere else.
        copied: copies of the largest cache that growing takes beside it, in memory.
        expanded: a layer's keys and values per token of context that a chunk makes anew from latents.
        kept_apart: of each cache that can lie on disk with its layer, the layer and bytes per token.
        kv_disk: ``off``, ``on``, or ``auto``: where a context does not fit otherwise. ``on_disk``: they do, but for
            those of resident layers.
        most_unit: the largest unit that the device has slots for. Layers that cannot be cut down to it are not
            ``streamable``.
    """

    layers: tuple[LayerSize, ...]
    non_layer: int
    cache: int
    token: int
    hidden: int
    score: int
    window: int
    state: int
    logits: int
    context: int
    prompt: int
    tables: int = 0
    head: LayerSize | None = None
    rest_kind: str = ""
    between: int = 0
    drafted: int = 0
    growing: tuple[Growing, ...] = ()
    sequences: int = 1
    shared: int = 0
    joining: int = 0
    step: int = KV_STEP
    fixed: int = 0
    workspace: int = 0
    kept: int = 0
    batches: int = 0
    recurrences: int = 0
    reuse: int = REUSE_BYTES
    versions: int = 0
    masked: int = 0
    expanded: int = 0
    copied: float = COPIED
    rest: int = REST_BYTES
    kept_apart: tuple[tuple[int, int], ...] = ()
    kv_disk: str = "off"
    on_disk: bool = False
    most_unit: int = most_unit(ARRAY_BYTES)

    @property
    def room(self) -> int:
        """Tokens of context that all sequences together have room for."""
        return self.shared or self.sequences * self.context

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

    def graph(self, on_cpu: bool) -> Graph:
        """What building forward passes takes."""
        most = GRAPH_BYTES["cpu" if on_cpu else "gpu"]
        return Graph(len(self.layers), self.recurrences, most, self.versions, self.masked, self.held_for_later)

    def at_context(self, context: int) -> ModelSize:
        """The same model with room for another number of tokens: full attention's caches grow with them, sliding
        windows' to their size, recurrent states not at all."""
        cache = self.states + held_bytes(self.growing, context)
        shared = max(self.shared, context) if self.shared else 0
        return replace(self, context=context, prompt=min(self.prompt, context), cache=cache, shared=shared)

    def beside(self, weights: int, cache: int, growing: tuple[Growing, ...]) -> ModelSize:
        """The same model with another one in memory beside it, of so many bytes of weights, with such caches."""
        return replace(
            self, non_layer=self.non_layer + weights, cache=self.cache + cache, growing=self.growing + growing
        )

    def in_batches(self, sequences: int, length: int) -> ModelSize:
        """The same model with memory for calls of so many sequences of ``length`` tokens, without caches and with the
        logits of every token, as mlx-lm's perplexity makes them."""
        tokens = sequences * length
        whole = replace(self, prompt=tokens, logits=tokens * self.logits // LOGITS_SHARE)
        more = whole.activations(tokens) - self.activations(min(length, self.prompt))
        return replace(self, batches=more + (sequences - 1) * STATES * self.state)

    @cached_property
    def held_for_later(self) -> int:
        """Bytes that several passes of a sweep may hold for later layers."""
        return max((layer.resident for layer in self.layers), default=0)

    def _held_for_later(self, chunk: int, waiting: int) -> int:
        """Bytes of it for a prompt of so many tokens; a single pass's are counted elsewhere."""
        passes = -(-waiting // max(1, chunk))
        mean = max(0, self.context - (waiting - chunk) // 2)
        every = passes * held_for_later(self.versions, self.masked, chunk, mean)
        return min(every, self.held_for_later) if passes > 1 else 0

    @cached_property
    def states(self) -> int:
        """Bytes of what does not grow with the context: recurrent states, which drafts are taken back to."""
        return self.cache - held_bytes(self.growing, self.context)

    @property
    def logits_row(self) -> int:
        """Bytes of one token's logits themselves."""
        return self.logits // LOGITS_COPIES

    @cached_property
    def _joined(self) -> int:
        """Bytes of weights that are put together for a pass of the layer that has the most of them."""
        return max((layer.joined for layer in self.layers), default=0)

    def activations(self, chunk: int, between: int | None = None) -> int:
        """Bytes that one pass over ``chunk`` tokens needs besides weights and caches.

        Args:
            between: what pieces put out that is there between two parts of a layer, as ``held_between`` says; None:
                layers are streamed whole.
        """
        return sum(self.activation_parts(chunk, between).values())

    def activation_parts(self, chunk: int, between: int | None = None) -> dict[str, int]:
        """What ``activations`` are the sum of, in bytes, by name."""
        several = self.sequences if self.sequences > 1 else 0
        waiting = max(self.prompt, self.joining) + several
        tokens = max(chunk, several)
        return {
            "hidden": self.hidden * waiting,
            "states": (max(chunk, STATES * several) + STATES) * self.state,
            "drafted": self.drafted * self.logits_row + self.states if self.drafted else 0,
            "between": 0 if between is None else (self.between + between) * max(0, waiting - chunk),
            "later": self._held_for_later(min(chunk, waiting), waiting),
            "expanded": self.expanded * self.context,
            "joined": UNDER_WAY * self._joined,
            "chunk": tokens * self.token,
            "scores": tokens * self.score * self.context,
            "windows": tokens * self.window,
            "logits": self.logits + max(0, several - 1) * self.logits // LOGITS_SHARE,
            "workspace": self.workspace,
            "kept": self.kept,
            "batches": self.batches,
            "rest": self.rest,
        }
