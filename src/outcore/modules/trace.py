"""Traces how a model runs its units: builds its forward pass once with placeholder weights, without evaluating it.

The trace shows the order of calls, the growth of caches, and which models access their layers from outside.
"""

from __future__ import annotations

import functools
import io
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, KVCache, make_prompt_cache

from ..sizes import Growing, held_bytes
from .cache_form import FEW, PROBES, CacheForm, Growth, cache_bytes, forms_of, known_growth, probed_growth
from .hooks import arrays_in, flat
from .layers import Layer, Projection
from .stand_ins import Casts, StandIns, restored

# How many arrays of attention scores (heads, tokens of a chunk, tokens of context) are in memory at once.
#
# On the CPU device ``mx.fast.scaled_dot_product_attention`` takes 1.03 times its scores' bytes, 3.03 with sinks (MLX
# 0.32.4; float32 and bfloat16, all masks, 1 to 128 tokens by 4,096 and 8,192). A GPU's kernels keep no scores for the
# head sizes that they support. Other attention has two arrays: the scores, or a mask as large, and their softmax.
FUSED, WITH_SINKS, OTHERWISE = 1, 3, 2

_one_at_a_time = threading.RLock()


class Attention:
    """Observed calls of fused attention.

    Attributes:
        sinks, masks: whether any call had sinks, or a mask of numbers for each head.
        each: most bytes per token of keys and values, over calls whose keys have exactly ``tokens`` tokens.
        shapes: heads of queries and keys, widths of keys and values, dtype; None: of a call with an array as mask.
    """

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self.calls, self.sinks, self.masks, self.each = 0, False, False, 0
        self.shapes = set[tuple[Any, ...] | None]()

    def note(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        mask, heads = kwargs.get("mask"), args[0].shape[1] if args else 0
        keys, values = args[1:3] if len(args) > 2 else (kwargs.get("k"), kwargs.get("v"))
        if isinstance(keys, mx.array) and isinstance(values, mx.array) and keys.shape[-2] == self._tokens:
            self.each = max(self.each, (keys.nbytes + values.nbytes) // self._tokens)
        plain = len(args) > 2 and (mask is None or isinstance(mask, str))
        self.shapes.add((heads, keys.shape[1], keys.shape[-1], values.shape[-1], args[0].dtype) if plain else None)
        self.calls += 1
        self.sinks |= kwargs.get("sinks") is not None
        self.masks |= isinstance(mask, mx.array) and mask.ndim == 4 and mask.shape[1] == heads > 1

    def scores(self, expected: int) -> int:
        """Return how many arrays of scores are in memory at once, for a model with ``expected`` attention layers."""
        if self.sinks:
            return WITH_SINKS
        return FUSED if self.calls >= expected and not self.masks else OTHERWISE


@contextmanager
def seen(tokens: int) -> Iterator[Attention]:
    """Observe this thread's attention calls while the block runs a text of ``tokens`` tokens."""
    found, here = Attention(tokens), threading.get_ident()
    with _one_at_a_time:
        original: Callable[..., mx.array] = mx.fast.scaled_dot_product_attention

        @functools.wraps(original)
        def noted(*args: Any, **kwargs: Any) -> mx.array:
            if threading.get_ident() == here:
                found.note(args, kwargs)
            return original(*args, **kwargs)

        mx.fast.scaled_dot_product_attention = noted
        try:
            yield found
        finally:
            mx.fast.scaled_dot_product_attention = original


@dataclass
class PassSize:
    """Memory of forward passes besides weights and caches, in bytes.

    Attributes:
        passed: per token, the array arguments that layers receive, including values for later layers.
        scores: how many arrays of attention scores are in memory at once (not bytes).
        versions: per token of context, keys and values that several layers use; of passes that share one reading of the
            weights, each keeps its own version until the last of these layers has run.
        masked: masks passed to layers, per token of a pass and token of context.
        expanded: per token of context, a layer's keys and values that a pass of several tokens recomputes from
            compressed caches (latents, as in DeepSeek's attention).
    """

    passed: int = 0
    scores: int = OTHERWISE
    versions: int = 0
    masked: int = 0
    expanded: int = 0


@dataclass
class Trace:
    """The result of building the forward pass once.

    Attributes:
        order: indices of layers, and of tables that are multiplied with, in call order; empty: no pass could be built.
            Tables are numbered after the layers.
        looked_up: by table whose rows are looked up, numbered as in ``order``: rows for each token.
        caches: growth of each cache, with every ``CacheList`` flattened; ``forms``: their forms.
        known: whether all caches are of known classes.
        state_bytes: bytes of the largest recurrent state; ``scanned``: of ``ssm_attn``'s decays from token to token.
        rewritten: whether recurrences write each token's state into one array, which MLX copies each time.
        evaluates: whether the model evaluates arrays inside its forward pass.
        failure: the error of a model that accesses its layers' weights from outside, so that layers cannot be streamed.
        pieces: by layer, the indices of its pieces in call order, if they can be streamed one by one.
        own: by layer, the indices in ``caches`` of plain caches that only it uses; for layers that are called once.
        used: by layer with routed experts, the number of experts per token.
        passing: memory that passes need.
        attention: shapes of fused attention, if all caches are plain ones and no mask is an array; else empty.
    """

    order: list[int] = field(default_factory=list)
    looked_up: dict[int, int] = field(default_factory=dict)
    caches: tuple[Growth, ...] = ()
    forms: tuple[CacheForm, ...] = ()
    known: bool = True
    state_bytes: int = 0
    rewritten: bool = False
    scanned: int = 0
    evaluates: bool = False
    failure: str | None = None
    pieces: dict[int, tuple[int, ...]] = field(default_factory=dict)
    own: dict[int, tuple[int, ...]] = field(default_factory=dict)
    used: dict[int, int] = field(default_factory=dict)
    passing: PassSize = field(default_factory=PassSize)
    attention: frozenset[tuple[Any, ...]] = frozenset()

    def cache_bytes(self, context: int) -> int:
        """Return the most bytes of the caches (KV, recurrent states) after ``context`` tokens and one more."""
        return sum(c.fixed for c in self.caches) + held_bytes(self.growing, context)

    @property
    def growing(self) -> tuple[Growing, ...]:
        """For each cache that grows: bytes per token, and the most tokens (None: no limit)."""
        return tuple(c.growing for c in self.caches if c.growing is not None)

    def growing_of(self, cache: int) -> int:
        growing = self.caches[cache].growing
        return growing[0] if growing is not None else 0

    @property
    def recurrences(self) -> int:
        return sum(bool(c.fixed) and c.growing is None for c in self.caches)

    @property
    def window_bytes(self) -> int:
        """Bytes per token of a prompt's last chunk that sliding windows free with the next token."""
        return sum(c.window for c in self.caches)


def trace_pass(
    model: nn.Module,
    layers: Sequence[Layer],
    tables: Sequence[Layer] = (),
    pieces: Sequence[Sequence[Projection]] = (),
    cast: Casts = lambda *_: None,
    switches: Mapping[int, Sequence[nn.Module]] = {},
) -> Trace:
    """Build the forward pass for a few tokens and one more, with placeholders for the layers' and tables' weights.

    A layer's weights are absent except during its own call, as in streaming, so a model that accesses them from outside
    fails. The placeholders belong to another thread's stream, so MLX raises an error if the model evaluates them inside
    its forward pass.

    The number of tokens is small because on the CPU device mlx-lm builds recurrences token by token, at 10 kB of nodes
    per token and layer.

    A model whose code differs by the number of tokens has ``outcore_traced``, the passes to trace: the first of ``FEW``
    tokens, the last of one.

    Args:
        pieces: by layer. The first attempt gives weights only during the calls of their own piece; if that fails, the
            next ones give a layer's weights during the layer's call.
        cast: returns a weight's computed dtype from its path and its dtype on disk; None: the same. Caches' sizes
            depend on it.
        switches: by layer, modules that are called with expert indices.
    """
    evaluates, failure = False, ""
    shared = [id(p.module) for parts in pieces for p in parts]
    few = list(getattr(model, "outcore_traced", (FEW, 1)))
    attempts: list[tuple[list[int], Sequence[Sequence[Projection]]]] = [(few, ()), ([1], ())]
    if pieces and len(set(shared)) == len(shared):
        attempts.insert(0, (few, pieces))
    # Some model code accepts single tokens only; one token shows the order too.
    for passes, parts in attempts:
        if evaluates and passes != [1]:
            continue
        run = _Run(model, layers, tables, cast, switches, foreign=not evaluates)
        try:
            found, caches, held = run.build(passes, parts)
        except Exception as e:  # a model's code may raise anything on absent weights
            failure = f"{type(e).__name__}: {e}"
            evaluates = evaluates or (isinstance(e, RuntimeError) and "Stream" in str(e))
            continue
        found.evaluates, several = evaluates, run.shared
        grown = [known_growth(c, n) for c, n in zip(caches, held[-2:][0], strict=True)]
        found.known = None not in grown
        unknown = [Growth()] * len(grown) if found.known else run.probed(held[-1], sum(passes))
        found.caches = tuple(known or probed for known, probed in zip(grown, unknown, strict=True))
        found.passing.versions += sum(found.growing_of(n) for n in several)
        if found.passing.expanded <= max((each for each, _ in found.growing), default=0):
            found.passing.expanded = 0
        return found
    return Trace(failure=failure)


@dataclass
class _Run:
    """One attempt to build the forward pass; arguments as in ``trace_pass``.

    Attributes:
        foreign: whether placeholders belong to another thread's stream.
        shared: indices of caches that are passed to several layers.
    """

    model: nn.Module
    layers: Sequence[Layer]
    tables: Sequence[Layer]
    cast: Casts
    switches: Mapping[int, Sequence[nn.Module]]
    foreign: bool
    shared: tuple[int, ...] = ()

    def probed(self, held: Sequence[int], tokens: int) -> list[Growth]:
        """Return all caches' growth from their sizes after longer texts.

        If passes over these cannot be built, assume that each cache grows by ``held`` / ``tokens`` bytes a token.
        """
        first, second = PROBES
        try:
            *_, probes = self.build([first, 1, second - first - 1, 1], ())
        except Exception:  # a model's code may fail on longer texts only
            return [Growth(growing=(-(-n // tokens), None)) if n else Growth() for n in held]
        return [probed_growth(a, b) for a, b in zip(probes[1], probes[3], strict=True)]

    def build(
        self, passes: Sequence[int], pieces: Sequence[Sequence[Projection]]
    ) -> tuple[Trace, list[Any], list[list[int]]]:
        """Build these passes; return the trace without caches' growth, the caches, and their bytes by pass."""
        # A layer of one piece is traced as a layer.
        split = {i: parts for i, parts in enumerate(pieces) if len(parts) > 1}
        units = [*self.layers, *self.tables]
        with (
            restored(self.model),
            StandIns(units, len(self.layers), split, self.cast, self.foreign, self.switches) as stage,
        ):
            found, cache = Trace(), make_prompt_cache(self.model)
            held: list[list[int]] = []
            called: list[dict[int, list[int]]] = []
            for tokens in passes:
                stage.begin()
                called.append(stage.calls)
                forms = forms_of(cache, known=True) if called[1:] else ()
                with seen(tokens) as attention:
                    out = self.model(mx.zeros((1, tokens), dtype=mx.int32), cache=cache)
                caches = flat(cache)
                recurrent = [c for c in caches if isinstance(c, ArraysCache)]
                if tokens == FEW and recurrent and isinstance(out, mx.array):
                    mx.export_to_dot(dot := io.StringIO(), out)
                    found.rewritten = dot.getvalue().count('"SliceUpdate"') >= len(caches) * 2 + FEW - 1
                    if '"CumSum"' in dot.getvalue():  # of ssm_attn, whose states are (batch, heads, ...)
                        heads = (a.shape[1] for c in recurrent for a in arrays_in(c) if a.ndim == 4)
                        found.scanned = max(heads, default=0) * mx.float32.size
                del out
                if not held:
                    _note_sizes(found, stage, attention, tokens, len(caches) - len(recurrent))
                    if found.passing.scores == FUSED and all(type(c) is KVCache for c in caches):
                        found.attention = frozenset(s for s in attention.shapes if s and None not in attention.shapes)
                held.append([cache_bytes(c) for c in caches])
            found.order, found.used = stage.order, stage.used
            found.looked_up = {n: -(-rows // sum(passes)) for n, rows in stage.looked_up.items()}
            if called[1:]:
                total = sum(passes)
                late = [a for a in stage.extra.values() if a.ndim > 2 and a.shape[-2] == total]
                found.passing.versions = sum(a.nbytes for a in late) // total
            found.forms = forms_of(cache, forms, known=len(passes) > 1)
            # Between the first and the last pass, a piece may be called once for each token.
            for calls in called[1:-1]:
                calls.update({i: [n for n, _ in itertools.groupby(order)] for i, order in calls.items()})
            orders = {i: _in_turn(len(split[i]), [c.get(i, []) for c in called]) for i in split}
            found.pieces = {i: order for i, order in orders.items() if order}
            users = {n: {i for i, g in stage.given.items() if any(c is x for x in g)} for n, c in enumerate(caches)}
            # Caches used by several layers, except recurrent states. A cache that no layer receives counts as shared,
            # since its users are unknown: iquestloopcoder has keys and values for a second round, deepseek_v41 (with
            # its own class) arrays that each pass makes anew.
            several = [n for n in users if len(users[n]) > 1 or (stage.given and not users[n])]
            self.shared = tuple(n for n in several if not isinstance(caches[n], ArraysCache))
            found.own = _own_caches(users, found.order, caches)
            found.state_bytes = max((a.nbytes for c in recurrent for a in arrays_in(c)), default=0)
        return found, caches, held


def _note_sizes(found: Trace, stage: StandIns, attention: Attention, tokens: int, attending: int) -> None:
    extra = list(stage.extra.values())
    found.passing.passed = -(-(stage.hidden + sum(a.nbytes for a in extra)) // tokens)
    masks = [a for a in extra if a.shape[-2:] == (tokens, tokens) and (a.ndim == 2 or a.dtype == mx.bool_)]
    found.passing.masked = -(-sum(a.nbytes for a in masks) // tokens**2)
    found.passing.expanded = attention.each
    found.passing.scores = attention.scores(attending)


def _own_caches(
    users: Mapping[int, set[int]], order: Sequence[int], caches: Sequence[Any]
) -> dict[int, tuple[int, ...]]:
    found: dict[int, tuple[int, ...]] = {}
    for n, c in enumerate(caches):
        if type(c) is KVCache and c.keys is not None and len(users[n]) == 1:
            (layer,) = users[n]
            if order.count(layer) == 1:
                found[layer] = (*found.get(layer, ()), n)
    return found


def _in_turn(pieces: int, passes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the order in which a layer calls its pieces; empty if it varies or a call omits or repeats a piece."""
    order = tuple(passes[-1][:pieces])
    if sorted(order) != list(range(pieces)):
        return ()
    return order if all(list(calls) == list(order) * (len(calls) // pieces) for calls in passes) else ()
