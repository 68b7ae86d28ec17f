"""Bytes of a model's layers, caches and activations, for a context and a number of sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from ..plan.cache_size import ALL, MERGED, STATES, CacheSize
from ..sizes import ARRAY_BYTES, KV_STEP, held_bytes, most_unit
from .partition import LayerSize

if TYPE_CHECKING:
    from .prediction import ExpertPlans

# Float32 copies of a token's logits while it is sampled.
LOGITS_COPIES = 6

# Bytes for token ids, sampling, masks and other small arrays; more where caches are of an unknown class. On the CPU
# device with 512 tokens, no tiny model of mlx-lm took more, except one with unknown caches, which took 0.7 MB more.
REST_BYTES, UNKNOWN_BYTES = 500_000, 2_000_000

# Versions of a rewritten array that are counted: on the CPU device MLX queues more, but waits at its memory limit.
UNDER_WAY_OPERATIONS = 10

SCAN = 256  # ``step`` of mlx_lm.models.ssm.ssm_attn

# ``ModelSize.logits`` counts six float32 arrays as wide as the vocabulary. Several sequences hold three at once:
# logits, the parts they are joined from, and log-probabilities (or logsumexp's copy); the others exist for one sequence
# at a time.
LOGITS_SHARE = 2

# Layers decoded at once: the one that computes and the one queued behind it. A long run of resident layers would queue
# more, but MLX then waits at its memory limit.
UNDER_WAY = 2

# Most freed bytes kept for reuse: enough for one token. A miss costs a CPU or CUDA little.
REUSE_BYTES = 64_000_000

# The same on Metal, where a miss creates a buffer (``newBuffer``, metal/allocator.cpp) and, while memory is wired,
# commits a residency set. Never measured.
METAL_REUSE_BYTES = 256_000_000

# Most bytes of MLX's graph for the passes of one shared reading of the weights. It is memory of the process, outside
# the budget. A GPU computes small chunks so fast that reading the weights twice would be noticeable.
GRAPH_BYTES = {"cpu": 64_000_000, "gpu": 256_000_000}


def held_for_later(versions: int, masked: int, tokens: int, context: int) -> int:
    """Returns KV and mask bytes that a pass of ``tokens`` keeps for later layers, with ``context`` cached tokens."""
    return (context + KV_STEP) * versions + context * tokens * masked


@dataclass(frozen=True)
class Graph:
    """Process memory for building forward passes, before any of them is computed. Bytes.

    Measured with MLX 0.32.4 on Linux: about 1 kB for an operation, 100 to 150 kB for a layer; for recurrences built
    token by token 14 kB more for each token and layer.

    Attributes:
        layers: number of layers.
        recurrent: number of layers whose recurrences are built token by token.
        most: bytes of graph that passes sharing one reading of the weights may take.
        versions, masked: what a pass keeps for later layers, as in ``ModelSize``.
        held: most bytes that several passes together may keep for later layers.
    """

    layers: int
    recurrent: int = 0
    most: int = GRAPH_BYTES["gpu"]
    versions: int = 0
    masked: int = 0
    held: int = 0

    def readings(self, passes: Sequence[int], context: int = 0, most: int = ALL) -> list[int]:
        """Returns, for each reading of the weights, how many passes share it.

        Args:
            passes: the tokens of each pass.
            context: tokens in the caches after the last pass.
            most: tokens of all passes of a reading, if a single pass has fewer.
        """
        counts: list[int] = []
        left = held = room = 0
        context = max(0, context - sum(passes))
        for tokens in passes:
            context += tokens
            nbytes = 128_000 * self.layers + 14_000 * self.recurrent * tokens
            kept = held_for_later(self.versions, self.masked, tokens, context)
            # A rank may have no layers, and a pass then takes nothing.
            if not counts or nbytes > left or kept > held or tokens > room:
                counts.append(0)
                left, held, room = self.most, max(self.held, kept), most
            counts[-1] += 1
            left -= nbytes
            held -= kept
            room -= tokens
        return counts


@dataclass(frozen=True, kw_only=True)
class ActivationSize(CacheSize):
    """Bytes that passes allocate while they compute.

    Attributes:
        token: activations per token of a chunk.
        hidden: a layer's input and output per token; a whole prompt's are in memory while its chunks are computed.
        between: hidden states per token between two parts of a layer, in addition to outputs of its pieces; a whole
            prompt's are in memory if layers are streamed in parts.
        score: attention scores per token of a chunk and token of context.
        window: KV per token of a chunk that sliding windows keep beyond their size until the next token.
        state: a recurrent state, if the recurrence is computed token by token and keeps a state for each; else 0.
            ``rewritten``: it, or ``scanned`` for each pair of tokens, has all versions under way of an array of them.
        logits: one token's logits and sampling's copies of them.
        workspace: reserved by the device's libraries.
        batches: activations of whole batches evaluated in one call, beyond those of a prompt.
        versions: bytes per context token of KV read by several layers; each pass keeps its own version.
        masked: bytes of masks per token of a pass and token of context; each pass keeps its own. Passes that hold more
            than the largest layer weighs do not share a reading of the weights: in small chunks, memory would grow with
            the square of the prompt (gemma3n, 1,600 tokens: 45 MB next to 1.8 MB of caches).
        rest: all other allocations.
        expanded: a layer's keys and values per token of context that a chunk expands from latents.
    """

    token: int
    hidden: int
    score: int
    window: int
    state: int
    logits: int
    rewritten: bool = False
    scanned: int = 0
    between: int = 0
    workspace: int = 0
    batches: int = 0
    versions: int = 0
    masked: int = 0
    expanded: int = 0
    rest: int = REST_BYTES


@dataclass(frozen=True)
class ModelSize(ActivationSize):
    """The sizes of a model that a plan is made from, in bytes.

    Attributes:
        non_layer: embeddings, norms, head, and every 1-D parameter; includes ``tables`` and ``head``.
        tables: embeddings that are only looked up in, so that single rows can be read; ``row_bytes``: those of a token.
        head: the output head (or tied embeddings) if it can be streamed in slices as large as the slots. ``slot`` is
            the smallest slice's, ``cast`` that of the whole head.
        rest_kind: everything computed outside of layers, as a kind of ``Calibration.kinds``.
        recurrences: number of layers whose recurrences are built token by token.
        reuse: most freed memory that MLX may keep for reuse.
        most_unit: the largest unit that a slot of this device holds. Larger layers that cannot be cut are not
            ``streamable``.
    """

    layers: tuple[LayerSize, ...]
    non_layer: int
    tables: int = 0
    row_bytes: int = 0
    head: LayerSize | None = None
    rest_kind: str = ""
    recurrences: int = 0
    reuse: int = REUSE_BYTES
    most_unit: int = most_unit(ARRAY_BYTES)

    @cached_property
    def on_demand(self) -> ExpertPlans | None:
        """The maker of plans with expert caches; None if no layer has routed experts that can be read one by one."""
        return next((layer.experts.on_demand for layer in self.layers if layer.experts is not None), None)

    @property
    def kinds(self) -> set[str]:
        return {layer.kind for layer in self.layers} | ({self.rest_kind} if self.layers else set())

    def graph(self, on_cpu: bool, split: bool = False) -> Graph:
        """Returns the limits of passes that share a reading; ``split``: layers are streamed in parts."""
        most, versions, held = GRAPH_BYTES["cpu" if on_cpu else "gpu"], self.versions, self.held_for_later
        if split and self.expanded:
            # Between two parts each pass keeps what it expanded; ``activations`` counts one pass's.
            versions, held = versions + self.expanded, min(held, self.expanded * self.context)
        return Graph(len(self.layers), self.recurrences, most, versions, self.masked, held)

    def at_context(self, context: int) -> ModelSize:
        """Returns the same model for another number of context tokens; only caches that grow change."""
        cache = self.states + held_bytes(self.growing, context)
        shared = max(self.shared, context) if self.shared else 0
        return replace(self, context=context, prompt=min(self.prompt, context), cache=cache, shared=shared)

    @cached_property
    def held_for_later(self) -> int:
        """Most bytes that several passes together may hold for later layers."""
        return max((layer.resident for layer in self.layers), default=0)

    def _held_for_later(self, chunk: int, waiting: int) -> int:
        """Returns bytes that several passes of a prompt keep for later layers; ``hidden`` has those of one pass."""
        passes = -(-waiting // max(1, chunk))
        mean = max(0, self.context - (waiting - chunk) // 2)
        every = passes * held_for_later(self.versions, self.masked, chunk, mean)
        return min(every, self.held_for_later) if passes > 1 else 0

    def in_reading(self, chunk: int) -> int:
        """Returns the most tokens that may share a reading of the weights, of prompts in passes of ``chunk``."""
        return max(self.reading // chunk, 1) * chunk

    def further_readings(self, chunk: int) -> int:
        """Returns how many readings of the weights the longest prompt takes after the first."""
        return max(0, self.prompt - 1) // self.in_reading(chunk)

    def ahead(self, chunk: int) -> int:
        """Returns bytes that passes of ``chunk`` tokens may take beyond MLX's memory limit: ten operations' memory."""
        rewritten = chunk * self._state(chunk) // 2 * self.rewritten
        merged = (STATES * self.sequences * self.fixed, *(MERGED * n for n in self._merged))
        return max(rewritten, *merged) if self.sequences > 1 else rewritten

    def _state(self, chunk: int) -> int:
        return max(self.state, self.scanned * min(chunk, SCAN))

    @property
    def logits_row(self) -> int:
        return self.logits // LOGITS_COPIES

    def activations(self, chunk: int, between: int | None = None) -> int:
        """Returns bytes that one pass over ``chunk`` tokens needs in addition to weights and caches.

        Args:
            between: bytes per token of pieces' outputs between two parts of a layer (``held_between``); None: layers
                are streamed whole.
        """
        return sum(self.activation_parts(chunk, between).values())

    def activation_parts(self, chunk: int, between: int | None = None) -> dict[str, int]:
        """Returns the terms of ``activations``, in bytes, by name."""
        several = self.sequences if self.sequences > 1 else 0
        waiting = min(max(self.prompt, self.joining), self.in_reading(chunk)) + several
        tokens = max(chunk, several)
        return {
            "hidden": self.hidden * waiting,
            "states": (max(chunk, STATES * several) + STATES) * self._state(chunk),
            "drafted": self.drafted * self.logits_row + self.states if self.drafted else 0,
            "between": 0 if between is None else (self.between + between) * max(0, waiting - chunk),
            "later": self._held_for_later(min(chunk, waiting), waiting),
            "expanded": self.expanded * self.context,
            "joined": UNDER_WAY * max((layer.joined for layer in self.layers), default=0),
            "chunk": tokens * self.token,
            "scores": tokens * self.score * self.context,
            "windows": tokens * self.window,
            "logits": self.logits + max(0, several - 1) * self.logits // LOGITS_SHARE,
            "workspace": self.workspace,
            "kept": self.kept,
            "batches": self.batches,
            "rest": self.rest,
        }
