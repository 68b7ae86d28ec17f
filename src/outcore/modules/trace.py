"""How a model runs its units: its forward pass is built once with stand-in weights that hold no memory and are never
evaluated. That tells the order of calls, what caches will hold, and what reaches into layers from outside.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, KVCache, make_prompt_cache

from ..sizes import Growing, held_bytes
from .attention import OTHERWISE, Attention, seen
from .cache_form import FEW, PROBES, CacheForm, Growth, cache_bytes, forms_of, known_growth, probed_growth
from .call_values import flat
from .hooks import arrays_in
from .layers import Layer, Projection
from .stand_ins import Casts, StandIns, restored


@dataclass
class PassSize:
    """What passes hold beside weights, and what is in caches. Bytes.

    Attributes:
        passed: per token, of what a layer is given beside caches; and of what later layers are given beside the
            layer's before them.
        scores: arrays of attention scores that are there at once.
        versions: bytes per token of context of keys and values that several layers use: of each pass of several they
            are there as they were then, until the last of the layers has computed it.
        masked: bytes of masks that layers are given, per token of a pass and token of context.
        expanded: bytes per token of context of a layer's keys and values that are made anew in a pass of several tokens
            from what caches hold of them (latents: DeepSeek's and others' attention).
    """

    passed: int = 0
    scores: int = OTHERWISE
    versions: int = 0
    masked: int = 0
    expanded: int = 0


@dataclass
class Trace:
    """What building the forward pass once has shown.

    Attributes:
        order: indices of layers in the order in which the model calls them; empty if it could not be built. Products
            with tables follow the layers in number.
        looked_up: indices of tables, counted on from the layers, of which rows are looked up.
        caches: what each cache holds, lists of them taken apart; ``forms``: what they look like.
        known: its caches are of classes that are known.
        state_bytes: bytes of the largest recurrent state.
        rewritten: recurrences write each token's state into an array of all tokens' states, which is copied each time.
        evaluates: the model evaluates arrays inside its forward pass.
        failure: what the model's code raised with weights absent outside of layers' calls, so that layers cannot be
            streamed; None: nothing.
        pieces: for each layer whose pieces can be streamed one after the other, their indices in the order of calls.
        own: for each layer that is called once, the numbers in ``caches`` of plain ones that it alone uses.
        used: for each layer with routed experts, how many of them a token uses.
        passing: what passes hold beside weights and caches.
    """

    order: list[int] = field(default_factory=list)
    looked_up: set[int] = field(default_factory=set)
    caches: tuple[Growth, ...] = ()
    forms: tuple[CacheForm, ...] = ()
    known: bool = True
    state_bytes: int = 0
    rewritten: bool = False
    evaluates: bool = False
    failure: str | None = None
    pieces: dict[int, tuple[int, ...]] = field(default_factory=dict)
    own: dict[int, tuple[int, ...]] = field(default_factory=dict)
    used: dict[int, int] = field(default_factory=dict)
    passing: PassSize = field(default_factory=PassSize)

    def cache_bytes(self, context: int) -> int:
        """Bytes of the caches (KV, recurrent states) at most, after ``context`` tokens and one more."""
        return sum(c.fixed for c in self.caches) + held_bytes(self.growing, context)

    @property
    def growing(self) -> tuple[Growing, ...]:
        """For each cache that grows with the context: bytes per token, and tokens at most (None: no limit)."""
        return tuple(c.growing for c in self.caches if c.growing is not None)

    def growing_of(self, cache: int) -> int:
        """Bytes per token of one of the caches."""
        growing = self.caches[cache].growing
        return growing[0] if growing is not None else 0

    @property
    def fixed_bytes(self) -> int:
        """Bytes of the largest cache that does not grow."""
        return max((c.fixed for c in self.caches if c.growing is None), default=0)

    @property
    def recurrences(self) -> int:
        """Caches that hold states, however long the text: those of recurrent layers."""
        return sum(bool(c.fixed) and c.growing is None for c in self.caches)

    @property
    def window_bytes(self) -> int:
        """Bytes per token of a prompt's last chunk that sliding windows give up with the next token."""
        return sum(c.window for c in self.caches)


def rehearse(
    model: nn.Module,
    layers: Sequence[Layer],
    tables: Sequence[Layer] = (),
    pieces: Sequence[Sequence[Projection]] = (),
    cast: Casts = lambda *_: None,
    switches: Mapping[int, Sequence[nn.Module]] = {},
) -> Trace:
    """Build the forward pass for a few tokens and one more, with stand-ins for the layers' and tables' weights.

    Outside a layer's own call its weights are absent, as they will be when it is streamed, so a model that reaches
    into its layers from outside is found out here. The stand-ins are arrays of another thread's stream: evaluating
    them is an error in MLX, so a model that evaluates inside its forward pass is found out too.

    How long a text is planned for makes no difference: on the CPU device mlx-lm's recurrences are built token by token,
    and each would take 10 kB of nodes a layer.

    Args:
        pieces: of each layer. First the weights are absent outside the calls of their own piece; a model that cannot
            do with that is rehearsed with whole layers.
        cast: the dtype that a weight is computed in, by its path and the dtype on disk; None: that one. Caches take as
            much as what fills them.
        switches: by layer, modules that are called with numbers of experts.
    """
    evaluates, failure = False, ""
    shared = [id(p.module) for parts in pieces for p in parts]
    attempts: list[tuple[list[int], Sequence[Sequence[Projection]]]] = [([FEW, 1], ()), ([1], ())]
    if pieces and len(set(shared)) == len(shared):
        attempts.insert(0, ([FEW, 1], pieces))
    # One token alone teaches the order too: some model code takes nothing else.
    for passes, parts in attempts:
        if evaluates and passes != [1]:
            continue
        run = _Run(model, layers, tables, cast, switches, foreign=not evaluates)
        try:
            found, caches, held = run.build(passes, parts)
        except Exception as e:  # whatever a model's code raises on weights that are absent
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
    """What is built: the arguments of ``rehearse``; ``foreign``: stand-ins are arrays of another thread's stream.

    Attributes:
        shared: the numbers of caches that several layers are given.
    """

    model: nn.Module
    layers: Sequence[Layer]
    tables: Sequence[Layer]
    cast: Casts
    switches: Mapping[int, Sequence[nn.Module]]
    foreign: bool
    shared: tuple[int, ...] = ()

    def probed(self, held: Sequence[int], tokens: int) -> list[Growth]:
        """How all caches grow by what they hold after longer texts; where those cannot be built, as if each grew from
        nothing to what was ``held`` after so many ``tokens``."""
        first, second = PROBES
        try:
            *_, probes = self.build([first, 1, second - first - 1, 1], ())
        except Exception:  # whatever a model's code raises: fewer tokens were no trouble
            return [Growth(growing=(-(-n // tokens), None)) if n else Growth() for n in held]
        return [probed_growth(a, b) for a, b in zip(probes[1], probes[3], strict=True)]

    def build(
        self, passes: Sequence[int], pieces: Sequence[Sequence[Projection]]
    ) -> tuple[Trace, list[Any], list[list[int]]]:
        """What the passes show, but for the caches' growth; the caches; and their bytes after each pass."""
        # A layer of one piece is that piece.
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
                if tokens == FEW and recurrent:
                    found.rewritten = _writes(out) >= len(caches) * 2 + FEW - 1
                del out
                if not held:
                    _see_first(found, stage, attention, tokens, len(caches) - len(recurrent))
                held.append([cache_bytes(c) for c in caches])
            found.order, found.looked_up, found.used = stage.order, stage.looked_up, stage.used
            if called[1:]:
                total = sum(passes)
                late = [a for a in stage.beside.values() if a.ndim > 2 and a.shape[-2] == total]
                found.passing.versions = sum(a.nbytes for a in late) // total
            found.forms = forms_of(cache, forms, known=len(passes) > 1)
            orders = {i: _in_turn(len(split[i]), [c.get(i, []) for c in called]) for i in split}
            found.pieces = {i: order for i, order in orders.items() if order}
            users = {n: {i for i, g in stage.given.items() if any(c is x for x in g)} for n, c in enumerate(caches)}
            # Recurrent states apart. A cache that no layer is given: what waits for which of them is not known. Of
            # iquestloopcoder's it is keys and values, for a second round; of deepseek_v41's, whose class is its own,
            # arrays that each pass makes anew.
            several = [n for n in users if len(users[n]) > 1 or (stage.given and not users[n])]
            self.shared = tuple(n for n in several if not isinstance(caches[n], ArraysCache))
            found.own = _own_caches(users, found.order, caches)
            found.state_bytes = max((a.nbytes for c in recurrent for a in arrays_in(c)), default=0)
        return found, caches, held


def _see_first(found: Trace, stage: StandIns, attention: Attention, tokens: int, attending: int) -> None:
    """What the first pass shows: bytes that layers are given, masks, attention's scores."""
    beside = list(stage.beside.values())
    found.passing.passed = -(-(stage.hidden + sum(a.nbytes for a in beside)) // tokens)
    masks = [a for a in beside if a.shape[-2:] == (tokens, tokens) and (a.ndim == 2 or a.dtype == mx.bool_)]
    found.passing.masked = -(-sum(a.nbytes for a in masks) // tokens**2)
    found.passing.expanded = attention.each
    found.passing.scores = attention.scores(attending)


def _writes(out: Any) -> int:
    """How many operations write into a part of an array, of those that a model's output is made by."""
    graph = io.StringIO()
    mx.export_to_dot(graph, *(a for a in [out] if isinstance(a, mx.array)))
    return graph.getvalue().count('"SliceUpdate"')


def _own_caches(
    users: Mapping[int, set[int]], order: Sequence[int], caches: Sequence[Any]
) -> dict[int, tuple[int, ...]]:
    """Of each layer that is called once, the plain caches that no other layer is given."""
    found: dict[int, tuple[int, ...]] = {}
    for n, c in enumerate(caches):
        if type(c) is KVCache and c.keys is not None and len(users[n]) == 1:
            (layer,) = users[n]
            if order.count(layer) == 1:
                found[layer] = (*found.get(layer, ()), n)
    return found


def _in_turn(pieces: int, passes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The order in which a layer calls its pieces if it is one and the same always, each once; else empty."""
    order = tuple(passes[-1][:pieces])
    if sorted(order) != list(range(pieces)):
        return ()
    return order if all(list(calls) == list(order) * (len(calls) // pieces) for calls in passes) else ()
