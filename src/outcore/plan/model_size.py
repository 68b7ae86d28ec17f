"""What a plan knows of a model: bytes of its layers, caches and activations, for a context and a number of sequences.
Numbers, no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from ..plan.cache_size import STATES, CacheSize
from ..sizes import ARRAY_BYTES, KV_STEP, Growing, held_bytes, most_unit
from .partition import LayerSize

if TYPE_CHECKING:
    from .prediction import ExpertPlans

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

UNDER_WAY = 2
"""Layers whose codes are put together at once: the one that is computed and the one that is queued behind it. Where
many that stay in memory follow each other MLX would have more under way, and waits at its memory limit instead."""

REUSE_BYTES = 64_000_000
"""Of freed memory that is kept for reuse at most: enough for what a token needs. A miss costs a CPU or CUDA little."""

METAL_REUSE_BYTES = 256_000_000
"""The same on Metal, where a miss makes a buffer (``newBuffer``, metal/allocator.cpp) and, while memory is wired, has a
residency set committed. Never measured."""

GRAPH_BYTES = {"cpu": 64_000_000, "gpu": 256_000_000}
"""Bytes of MLX's graph that the passes of one sweep may take: memory of the process's own, which no budget counts. A
GPU computes small chunks so fast that another sweep would be felt."""


def held_for_later(versions: int, masked: int, tokens: int, context: int) -> int:
    """Bytes that a pass over so many tokens holds for later layers, behind which caches hold ``context``."""
    return (context + KV_STEP) * versions + context * tokens * masked


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


@dataclass(frozen=True, kw_only=True)
class ActivationSize(CacheSize):
    """What passes allocate on the way. Bytes, per token where said.

    Attributes:
        token: activations per token of a chunk.
        hidden: a layer's input and output per token: those of a whole prompt are held while it is computed in chunks.
        between: hidden states, per token, that are there between two parts of a layer beside what its pieces put out:
            where layers are streamed in parts, those of a whole prompt.
        score: attention scores per token of a chunk and token of context.
        window: KV per token of a chunk that sliding windows keep beyond their size until the next token comes.
        state: a recurrent state, where a recurrence is computed token by token and keeps one for each.
        logits: one token's logits and what sampling makes of them.
        workspace: what the device's libraries keep for themselves.
        batches: activations of whole batches that are evaluated in one call, beyond those of a prompt.
        versions: keys and values that several layers use, per token of context: of each pass of a sweep they are there
            as they were then. ``masked``: masks, per token of a pass and token of context, of each pass too. Passes
            that hold more than the largest layer weighs do not share a sweep: else, in small chunks, they would take
            memory by the square of a prompt (gemma3n, 1,600 tokens: 45 MB beside 1.8 MB of caches).
        rest: what is allocated on the way and counted nowhere else.
        expanded: a layer's keys and values per token of context that a chunk makes anew from latents.
    """

    token: int
    hidden: int
    score: int
    window: int
    state: int
    logits: int
    between: int = 0
    workspace: int = 0
    batches: int = 0
    versions: int = 0
    masked: int = 0
    expanded: int = 0
    rest: int = REST_BYTES


@dataclass(frozen=True)
class ModelSize(ActivationSize):
    """What a plan needs to know of a model. Bytes.

    Attributes:
        non_layer: embeddings, norms, head, and every 1-D parameter; ``tables`` and ``head`` included.
        tables: embeddings that are only looked up in, so that rows of them can be read for the tokens at hand.
        head: what is multiplied with outside of layers (the head, tied embeddings), if it can be streamed in slices;
            ``slot`` is the smallest slice's; slices are as large as the slots. ``cast`` is that of all of it.
        rest_kind: the kind of all that is computed outside of layers.
        recurrences: layers whose recurrences are built token by token.
        reuse: freed memory that MLX may keep for reuse at most.
        most_unit: the largest unit that the device has slots for. Layers that cannot be cut down to it are not
            ``streamable``.
    """

    layers: tuple[LayerSize, ...]
    non_layer: int
    tables: int = 0
    head: LayerSize | None = None
    rest_kind: str = ""
    recurrences: int = 0
    reuse: int = REUSE_BYTES
    most_unit: int = most_unit(ARRAY_BYTES)

    @cached_property
    def on_demand(self) -> ExpertPlans | None:
        """What makes plans that read experts one by one (``prediction.ExpertPlans``); None: there are none."""
        return next((layer.experts.on_demand for layer in self.layers if layer.experts is not None), None)

    @property
    def kinds(self) -> set[str]:
        """The kinds of its layers, and of what lies outside of them; none without layers."""
        return {layer.kind for layer in self.layers} | ({self.rest_kind} if self.layers else set())

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
