"""How a model runs its units: its forward pass is built once with stand-in weights that hold no memory and are never
evaluated. That tells the order of calls, what caches will hold, and what reaches into layers from outside.
"""

from __future__ import annotations

import functools
import io
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, KVCache, make_prompt_cache

from ..plan.cache_size import Growing, held_bytes
from .attention import OTHERWISE, seen
from .cache_form import CacheForm, forms_of
from .cache_growth import FEW, PROBES, Growth, cache_bytes, known_growth, probed_growth
from .call_values import caches_in, flat
from .hooks import Call, absent, arrays_in, put, swap, unswap
from .layers import Layer, Projection
from .module_tree import modules
from .switches import switches_in

Casts = Callable[[str, mx.Dtype], mx.Dtype | None]


@dataclass
class Trace:
    """What building the forward pass once has shown.

    Attributes:
        order: indices of layers in the order in which the model calls them; empty if it could not be built. Products
            with tables follow the layers in number.
        looked_up: indices of tables, counted on from the layers, of which rows are looked up.
        caches: what each cache holds, lists of them taken apart.
        state_bytes: bytes of the largest recurrent state.
        evaluates: the model evaluates arrays inside its forward pass.
        outside: why layers cannot be streamed: the model reaches into them from outside; else None.
        failure: what the model's code raised then.
        pieces: for each layer whose pieces can be streamed one after the other, their indices in the order of calls.
        forms: what its caches look like.
        own: for each layer that is called once, the numbers in ``caches`` of plain ones that it alone uses.
        used: for each layer with routed experts, how many of them a token uses.
        passed_bytes: per token, of what a layer is given beside caches; and of what later layers are given beside the
            layer's before them.
        scores: arrays of attention scores that are there at once.
        handed: bytes per token of context of keys and values that are handed on to later layers beside caches.
        shared: the numbers in ``caches`` of those that several layers are given, or none.
        masked: bytes of masks that layers are given, per token of a pass and token of context.
        rewritten: recurrences write each token's state into an array of all tokens' states, which is copied each time.
        known: its caches are of classes that are known.
        expanded: bytes per token of context of a layer's keys and values that are made anew in a pass of several tokens
            from what caches hold of them (latents: DeepSeek's and others' attention).
    """

    order: list[int] = field(default_factory=list)
    looked_up: set[int] = field(default_factory=set)
    caches: tuple[Growth, ...] = ()
    state_bytes: int = 0
    evaluates: bool = False
    outside: str | None = None
    failure: str | None = None
    pieces: dict[int, tuple[int, ...]] = field(default_factory=dict)
    forms: tuple[CacheForm, ...] = ()
    own: dict[int, tuple[int, ...]] = field(default_factory=dict)
    used: dict[int, int] = field(default_factory=dict)
    passed_bytes: int = 0
    scores: int = OTHERWISE
    handed: int = 0
    shared: tuple[int, ...] = ()
    masked: int = 0
    expanded: int = 0
    rewritten: bool = False
    known: bool = True

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
    def versions(self) -> int:
        """Bytes per token of context of keys and values that several layers use: of each pass of a sweep they are there
        as they were then, until the last of the layers has computed it."""
        return self.handed + sum(map(self.growing_of, self.shared))

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
    """
    evaluates = False
    failure: Exception | None = None
    shared = [id(p.module) for parts in pieces for p in parts]
    attempts: list[tuple[list[int], Sequence[Sequence[Projection]]]] = [([FEW, 1], ()), ([1], ())]
    if pieces and len(set(shared)) == len(shared):
        attempts.insert(0, ([FEW, 1], pieces))
    # One token alone teaches the order too: some model code takes nothing else.
    for passes, parts in attempts:
        if evaluates and passes != [1]:
            continue
        try:
            result, caches, held = _build(model, layers, tables, passes, parts, cast, foreign=not evaluates)
        except Exception as e:  # whatever a model's code raises on weights that are absent
            failure = e
            evaluates = evaluates or (isinstance(e, RuntimeError) and "Stream" in str(e))
            continue
        result.evaluates = evaluates
        before = held[-2] if len(held) > 1 else held[-1]
        found = [known_growth(c, n) for c, n in zip(caches, before, strict=True)]
        unknown = (
            _unknown_growth(model, layers, tables, held[-1], sum(passes), cast, foreign=not evaluates)
            if None in found
            else [Growth()] * len(found)
        )
        result.known = None not in found
        result.caches = tuple(known or probed for known, probed in zip(found, unknown, strict=True))
        if result.expanded <= max((each for each, _ in result.growing), default=0):
            result.expanded = 0
        return result
    assert failure is not None
    return _outside(failure)


def _outside(error: Exception) -> Trace:
    what = f"{type(error).__name__}: {error}"
    return Trace(outside=f"its forward pass reaches into layers from outside ({what})", failure=what)


def _unknown_growth(
    model: nn.Module,
    layers: Sequence[Layer],
    tables: Sequence[Layer],
    held: Sequence[int],
    tokens: int,
    cast: Casts,
    *,
    foreign: bool,
) -> list[Growth]:
    """How all caches grow by what they hold after longer texts; where those cannot be built, as if each grew from
    nothing to what was ``held`` after so many ``tokens``."""
    first, second = PROBES
    try:
        *_, probes = _build(model, layers, tables, [first, 1, second - first - 1, 1], (), cast, foreign=foreign)
    except Exception:  # whatever a model's code raises: fewer tokens were no trouble
        return [Growth(growing=(-(-n // tokens), None)) if n else Growth() for n in held]
    return [probed_growth(a, b) for a, b in zip(probes[1], probes[3], strict=True)]


def _build(
    model: nn.Module,
    layers: Sequence[Layer],
    tables: Sequence[Layer],
    passes: Sequence[int],
    pieces: Sequence[Sequence[Projection]],
    cast: Casts,
    *,
    foreign: bool,
) -> tuple[Trace, list[Any], list[list[int]]]:
    """What the passes show, but for the caches' growth; the caches; and their bytes after each pass."""
    # A layer of one piece is that piece.
    split = {i: parts for i, parts in enumerate(pieces) if len(parts) > 1}
    with _StandIns([*layers, *tables], len(layers), split, cast, foreign) as stage, restored(model):
        stage.set()
        result, cache = stage.result, make_prompt_cache(model)
        held: list[list[int]] = []
        called: list[dict[int, list[int]]] = []
        for tokens in passes:
            # The order is that of one sweep.
            result.order.clear()
            stage.calls = {}
            stage.given, stage.hidden, stage.beside = {}, 0, {}
            called.append(stage.calls)
            forms = forms_of(cache, known=True) if called[1:] else ()
            with seen(tokens) as attention:
                out = model(mx.zeros((1, tokens), dtype=mx.int32), cache=cache)
            if tokens == FEW and any(isinstance(c, ArraysCache) for c in flat(cache)):
                result.rewritten = _writes(out) >= len(flat(cache)) * 2 + FEW - 1
            del out
            held.append([cache_bytes(c) for c in flat(cache)])
            if not held[1:]:
                passed = stage.hidden + sum(a.nbytes for a in stage.beside.values())
                result.passed_bytes = -(-passed // tokens)
                masks = [a for a in stage.beside.values() if a.shape[-2:] == (tokens, tokens) and _mask(a)]
                result.expanded = attention.each
                result.masked = -(-sum(a.nbytes for a in masks) // tokens**2)
                result.scores = attention.scores(sum(not isinstance(c, ArraysCache) for c in flat(cache)))
        if called[1:]:
            total = sum(passes)
            result.handed = sum(a.nbytes for a in stage.beside.values() if a.ndim > 2 and a.shape[-2] == total) // total
        result.shared = _shared_caches(stage.given, flat(cache))
        result.forms = forms_of(cache, forms, known=len(passes) > 1)
        result.pieces = {i: order for i in split if (order := _in_turn(len(split[i]), [c.get(i, []) for c in called]))}
        result.own = _own_caches(stage.given, result.order, flat(cache))
        states = [a.nbytes for c in flat(cache) if isinstance(c, ArraysCache) for a in arrays_in(c)]
        result.state_bytes = max(states, default=0)
    return result, flat(cache), held


def _writes(out: Any) -> int:
    """How many operations write into a part of an array, of those that a model's output is made by."""
    graph = io.StringIO()
    mx.export_to_dot(graph, *(a for a in [out] if isinstance(a, mx.array)))
    return graph.getvalue().count('"SliceUpdate"')


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Some modules keep products of their weights from the first call on; those of a rehearsal must not stay."""
    before = [(m, dict(m), dict(m.__dict__)) for m in modules(model)]
    try:
        yield
    finally:
        for module, items, attributes in before:
            dict.clear(module)
            dict.update(module, items)
            module.__dict__.clear()
            module.__dict__.update(attributes)


class _StandIns:
    """Units with stand-ins for weights, which are there during a unit's own call only; and what calls them.

    Args:
        layers: so many units are layers, the others tables.
        split: pieces of the layers that have more than one.

    Attributes:
        calls: pieces in the order of their calls, by layer. ``given``: caches that each layer was called with.
        hidden: bytes of the largest first argument of a layer; ``beside``: all others that are arrays, each once.
    """

    def __init__(
        self, units: Sequence[Layer], layers: int, split: Mapping[int, Sequence[Projection]], cast: Casts, foreign: bool
    ) -> None:
        self.result, self.calls = Trace(), dict[int, list[int]]()
        self.given: dict[int, list[Any]] = {}
        self.hidden, self.beside = 0, dict[int, mx.array]()
        self._units, self._layers, self._split = units, layers, split
        self._weights = [[p.array for p in unit.parameters] for unit in units]
        computed = [
            [cast(f"{unit.path}.{p.path}", p.array.dtype) or p.array.dtype for p in unit.parameters] for unit in units
        ]
        self._stand_ins = stand_ins(self._weights, computed, foreign)

    def __enter__(self) -> _StandIns:
        return self

    def __exit__(self, *_: object) -> None:
        for unit in self._units:
            unswap(unit.module)
        for parts in self._split.values():
            for piece in parts:
                unswap(piece.module)
        for unit in self._units[: self._layers]:
            for module in switches_in(unit):
                unswap(module)

    def set(self) -> None:
        """Take the weights away, and lead calls through here."""
        for i, unit in enumerate(self._units):
            put(unit.parameters, absent(self._weights[i]))
            ordered = self._with_weights(i, range(len(unit.parameters)), functools.partial(self.result.order.append, i))
            if i in self._split:
                swap(unit.module, "Rehearsed", self._noted(i))
                for n, piece in enumerate(self._split[i]):
                    swap(piece.module, "Rehearsed", self._piece(i, n, piece))
                for module in switches_in(unit):
                    swap(module, "Rehearsed", self._routed(i))
            elif i >= self._layers and isinstance(unit.module, nn.Embedding | nn.QuantizedEmbedding):
                looked_up = self._with_weights(
                    i, range(len(unit.parameters)), functools.partial(self.result.looked_up.add, i)
                )
                swap(unit.module, "Rehearsed", looked_up, ordered)
            else:
                swap(unit.module, "Rehearsed", ordered)

    def _piece(self, layer: int, number: int, piece: Projection) -> Call:
        return self._with_weights(
            layer, piece.parameters, lambda: self.calls.setdefault(layer, []).append(number), piece=True
        )

    def _with_weights(
        self, unit: int, numbers: Sequence[int], note: Callable[[], None], *, piece: bool = False
    ) -> Call:
        parameters = [self._units[unit].parameters[n] for n in numbers]
        arrays = [self._stand_ins[unit][n] for n in numbers]
        nothing = absent([self._weights[unit][n] for n in numbers])

        def call(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            note()
            if not piece:
                self._see(unit, args, kwargs)
            put(parameters, arrays)
            try:
                return original(*args, **kwargs)
            finally:
                put(parameters, nothing)

        return call

    def _noted(self, layer: int) -> Call:
        def call(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            self.result.order.append(layer)
            self._see(layer, args, kwargs)
            return original(*args, **kwargs)

        return call

    def _see(self, unit: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.given.setdefault(unit, []).extend(caches_in(args, kwargs))
        if unit < self._layers:
            arrays = _arrays([*args, *kwargs.values()])
            self.hidden = max(self.hidden, *(a.nbytes for a in arrays[:1]), 0)
            self.beside |= {id(a): a for a in arrays[1:]}

    def _routed(self, layer: int) -> Call:
        def call(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            indices = kwargs["indices"] if "indices" in kwargs else args[1]
            self.result.used[layer] = indices.shape[-1]
            return original(*args, **kwargs)

        return call


def _mask(array: mx.array) -> bool:
    return array.ndim == 2 or array.dtype == mx.bool_


def _arrays(values: Iterable[Any]) -> list[mx.array]:
    """Arrays, and those in sequences of them; not what caches hold."""
    parts = ([v] if isinstance(v, mx.array) else _arrays(v) if isinstance(v, list | tuple) else [] for v in values)
    return [a for part in parts for a in part]


def _shared_caches(given: Mapping[int, Sequence[Any]], caches: Sequence[Any]) -> tuple[int, ...]:
    """The numbers of caches that several layers are given, but for recurrent states; or no layer that is called: what
    waits for which of them is not known then. Of iquestloopcoder's it is keys and values, for a second round; of
    deepseek_v41's, whose class is its own, arrays that each pass makes anew."""
    users = [sum(any(c is g for g in used) for used in given.values()) for c in caches]
    unseen = 0 if given else -1
    return tuple(
        n for n, c in enumerate(caches) if (users[n] > 1 or users[n] == unseen) and not isinstance(c, ArraysCache)
    )


def _own_caches(
    given: Mapping[int, Sequence[Any]], order: Sequence[int], caches: Sequence[Any]
) -> dict[int, tuple[int, ...]]:
    """Of each layer that is called once, the plain caches that no other layer is given."""
    numbers = {id(c): n for n, c in enumerate(caches)}
    users: dict[int, set[int]] = {}
    for layer, used in given.items():
        for c in used:
            users.setdefault(id(c), set()).add(layer)
    found = {}
    for layer, used in given.items():
        plain = {id(c): c for c in used if type(c) is KVCache and c.keys is not None}
        mine = [c for key, c in plain.items() if users[key] == {layer}]
        if mine and order.count(layer) == 1 and all(id(c) in numbers for c in mine):
            found[layer] = tuple(numbers[id(c)] for c in mine)
    return found


def _in_turn(pieces: int, passes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The order in which a layer calls its pieces if it is one and the same always, each once; else empty."""
    order = tuple(passes[-1][:pieces])
    if sorted(order) != list(range(pieces)):
        return ()
    return order if all(list(calls) == list(order) * (len(calls) // pieces) for calls in passes) else ()


def stand_ins(
    weights: Sequence[Sequence[mx.array]], dtypes: Sequence[Sequence[mx.Dtype]], foreign: bool
) -> list[list[mx.array]]:
    made: dict[tuple[tuple[int, ...], mx.Dtype], mx.array] = {}
    stream = _foreign_stream(mx.default_device().type) if foreign else None
    for arrays, computed in zip(weights, dtypes, strict=True):
        for a, dtype in zip(arrays, computed, strict=True):
            if (a.shape, dtype) not in made:
                zero = mx.zeros((1,) * a.ndim, dtype=dtype, stream=stream)
                made[a.shape, dtype] = mx.broadcast_to(zero, a.shape, stream=stream)
    return [
        [made[a.shape, dtype] for a, dtype in zip(arrays, computed, strict=True)]
        for arrays, computed in zip(weights, dtypes, strict=True)
    ]


@functools.cache
def _foreign_stream(device: mx.DeviceType) -> mx.Stream:
    """Another thread's stream of a device: one for all rehearsals, because MLX never ends the thread behind it."""
    made: list[mx.Stream] = []
    thread = threading.Thread(target=lambda: made.append(mx.default_stream(mx.Device(device))))
    thread.start()
    thread.join()
    return made[0]
