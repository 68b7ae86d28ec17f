"""Which modules of a model are units, and how the model runs them: found by looking, never by model type.

A layer list is any list of modules in the module tree, under whatever name (``layers``, ``h``, ``blocks``, nested or
put together by a property). What cannot be known from the tree, a rehearsal tells: the model's forward pass is built
once with stand-in weights that hold no memory and are never evaluated.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, CacheList, make_prompt_cache


@dataclass(frozen=True)
class Parameter:
    """One parameter of a layer: ``module[key]``; ``path`` is dotted, from the layer."""

    path: str
    module: nn.Module
    key: str

    @property
    def array(self) -> mx.array:
        return self.module[self.key]


@dataclass(frozen=True)
class Layer:
    """A module that can be streamed, and its parameters that would be."""

    path: str
    module: nn.Module
    parameters: tuple[Parameter, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the parameters that would be streamed."""
        return sum(p.array.nbytes for p in self.parameters)


@dataclass(frozen=True)
class Piece:
    """A module inside a layer that holds weights of its own, with all below it (a projection, as a rule): the least
    that can stay in memory, or be streamed, by itself.

    Attributes:
        parameters: indices into the layer's parameters.
    """

    module: nn.Module
    parameters: tuple[int, ...]


def find_pieces(layer: Layer) -> tuple[Piece, ...]:
    """The pieces of a layer in the order of the tree; together they hold each of its parameters once."""
    below = {id(p.module): {id(m) for m in p.module.modules()} for p in layer.parameters}
    owners = {id(p.module): p.module for p in layer.parameters}
    outer = [m for key, m in owners.items() if not any(key in below[k] for k in owners if k != key)]
    return tuple(
        Piece(m, tuple(n for n, p in enumerate(layer.parameters) if id(p.module) in below[id(m)])) for m in outer
    )


def find_layers(model: nn.Module) -> list[Layer]:
    """Every module of every layer list, in the order of the tree; none lies inside another.

    1-D parameters (norms, biases) are left out: they stay resident, which costs nothing, and some models read a
    neighbour's norm from outside.
    """
    found: dict[int, Layer] = {}
    _walk(model, "", found, set())
    return list(found.values())


TABLES = (nn.Embedding, nn.QuantizedEmbedding, nn.Linear, nn.QuantizedLinear)


def find_tables(model: nn.Module, layers: Sequence[Layer]) -> list[Layer]:
    """Embeddings and linear layers that no layer holds: looked up by row, or multiplied with in slices of rows."""
    inside = {id(m) for layer in layers for m in layer.module.modules()}
    found = []
    for path, module in model.named_modules():
        if type(module) in TABLES and id(module) not in inside:
            inside.add(id(module))
            found.append(Layer(path, module, tuple(_parameters(module))))
    return found


def _walk(module: nn.Module, path: str, found: dict[int, Layer], seen: set[int]) -> None:
    if id(module) in seen:
        return
    seen.add(id(module))
    for key, value in module.items():
        here = f"{path}.{key}" if path else key
        if isinstance(value, nn.Module):
            _walk(value, here, found, seen)
        elif isinstance(value, list | tuple):
            modules = [(i, m) for i, m in enumerate(value) if isinstance(m, nn.Module)]
            is_layers = len(modules) > 1 and not any(_is_leaf(m) for _, m in modules)
            for i, m in modules:
                if not is_layers:
                    _walk(m, f"{here}.{i}", found, seen)
                elif id(m) not in seen:
                    seen.add(id(m))
                    parameters = tuple(_parameters(m))
                    if parameters:
                        found[id(m)] = Layer(f"{here}.{i}", m, parameters)
        elif isinstance(value, dict):
            for k, m in value.items():
                if isinstance(m, nn.Module):
                    _walk(m, f"{here}.{k}", found, seen)


def _is_leaf(module: nn.Module) -> bool:
    # The nearest class that is not our own subclass of one of MLX's.
    cls = next(c for c in type(module).__mro__ if not c.__module__.startswith(__package__ + "."))
    return cls.__module__.startswith("mlx.nn")


def _parameters(layer: nn.Module) -> Iterator[Parameter]:
    seen: set[int] = set()
    for path, module in layer.named_modules():
        if id(module) in seen:
            continue
        seen.add(id(module))
        for key, value in module.items():
            if isinstance(value, mx.array) and value.ndim > 1 and not key.startswith("_"):
                yield Parameter(f"{path}.{key}" if path else key, module, key)


@dataclass
class Rehearsal:
    """What building the forward pass once has shown.

    Attributes:
        order: indices of layers in the order in which the model calls them; empty if it could not be built. Products
            with tables follow the layers in number.
        looked_up: indices of tables, counted on from the layers, of which rows are looked up.
        cache_bytes: bytes of the caches (KV, recurrent states) after ``context`` tokens and one more.
        growing: for each cache that grows with the context: bytes per token, and tokens at most (None: no limit).
        window_bytes: bytes per token of a prompt's last chunk that sliding windows give up with the next token.
        state_bytes: bytes of the largest recurrent state.
        evaluates: the model evaluates arrays inside its forward pass.
        outside: why layers cannot be streamed: the model reaches into them from outside; else None.
        pieces: for each layer whose pieces can be streamed one after the other, their indices in the order of calls.
    """

    order: list[int] = field(default_factory=list)
    looked_up: set[int] = field(default_factory=set)
    cache_bytes: int = 0
    growing: tuple[tuple[int, int | None], ...] = ()
    window_bytes: int = 0
    state_bytes: int = 0
    evaluates: bool = False
    outside: str | None = None
    pieces: dict[int, tuple[int, ...]] = field(default_factory=dict)


def rehearse(
    model: nn.Module,
    layers: Sequence[Layer],
    context: int,
    tables: Sequence[Layer] = (),
    pieces: Sequence[Sequence[Piece]] = (),
) -> Rehearsal:
    """Build the forward pass for ``context`` tokens and one more, with stand-ins for the layers' and tables' weights.

    Outside a layer's own call its weights are absent, as they will be when it is streamed, so a model that reaches
    into its layers from outside is found out here. The stand-ins are arrays of another thread's stream: evaluating
    them is an error in MLX, so a model that evaluates inside its forward pass is found out too.

    Args:
        pieces: of each layer. First the weights are absent outside the calls of their own piece; a model that cannot
            do with that is rehearsed with whole layers.
    """
    evaluates = False
    failure: Exception | None = None
    shared = [id(p.module) for parts in pieces for p in parts]
    attempts: list[tuple[list[int], Sequence[Sequence[Piece]]]] = [([context, 1], ()), ([1], ())]
    if pieces and len(set(shared)) == len(shared):
        attempts.insert(0, ([context, 1], pieces))
    # One token alone teaches the order too; then the caches' growth is a guess. Some model code takes nothing else.
    for passes, parts in attempts:
        if evaluates and passes != [1]:
            continue
        try:
            result = _build(model, layers, tables, passes, parts, foreign=not evaluates)
        except Exception as e:  # whatever a model's code raises on weights that are absent
            failure = e
            evaluates = evaluates or (isinstance(e, RuntimeError) and "Stream" in str(e))
            continue
        result.evaluates = evaluates
        if passes == [1]:
            # Caches grow in steps of 256 tokens, the first of which one token has taken.
            result.cache_bytes *= -(-(context + 1) // 256)
        return result
    assert failure is not None
    return _outside(failure)


def _outside(error: Exception) -> Rehearsal:
    return Rehearsal(outside=f"its forward pass reaches into layers from outside ({type(error).__name__}: {error})")


def _build(
    model: nn.Module,
    layers: Sequence[Layer],
    tables: Sequence[Layer],
    passes: Sequence[int],
    pieces: Sequence[Sequence[Piece]],
    *,
    foreign: bool,
) -> Rehearsal:
    result = Rehearsal()
    # A layer of one piece is that piece.
    split = {i: parts for i, parts in enumerate(pieces) if len(parts) > 1}
    calls: dict[int, list[int]] = {}
    seen: list[dict[int, list[int]]] = []
    units = [*layers, *tables]
    weights = [[p.array for p in unit.parameters] for unit in units]
    stand_ins = _stand_ins(weights, foreign)
    # Some modules keep products of their weights from the first call on; those of a rehearsal must not stay.
    before = [(m, dict(m), dict(m.__dict__)) for m in model.modules()]

    def enter(index: int, note: Callable[[int], None]) -> Call:
        def call(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            note(index)
            put(units[index].parameters, stand_ins[index])
            try:
                return original(*args, **kwargs)
            finally:
                put(units[index].parameters, absent(weights[index]))

        return call

    def enter_piece(i: int, piece: int, numbers: Sequence[int]) -> Call:
        parameters = [units[i].parameters[n] for n in numbers]
        arrays, nothing = [stand_ins[i][n] for n in numbers], absent([weights[i][n] for n in numbers])

        def call(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            calls.setdefault(i, []).append(piece)
            put(parameters, arrays)
            try:
                return original(*args, **kwargs)
            finally:
                put(parameters, nothing)

        return call

    def note_layer(i: int) -> Call:
        def call(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            result.order.append(i)
            return original(*args, **kwargs)

        return call

    try:
        for i, unit in enumerate(units):
            put(unit.parameters, absent(weights[i]))
            if i in split:
                swap(unit.module, "Rehearsed", note_layer(i))
                for n, piece in enumerate(split[i]):
                    swap(piece.module, "Rehearsed", enter_piece(i, n, piece.parameters))
                continue
            ordered = enter(i, result.order.append)
            if i >= len(layers) and isinstance(unit.module, nn.Embedding | nn.QuantizedEmbedding):
                swap(unit.module, "Rehearsed", enter(i, result.looked_up.add), ordered)
            else:
                swap(unit.module, "Rehearsed", ordered)
        cache = make_prompt_cache(model)
        for tokens in passes:
            # The order is that of one sweep; the token after the prompt shows how the caches grow.
            result.order.clear()
            calls = {}
            seen.append(calls)
            held = _held(cache)
            model(mx.zeros((1, tokens), dtype=mx.int32), cache=cache)
        left = _held(cache)
        result.cache_bytes = sum(left)
        result.growing = tuple(_growing(cache))
        # A window keeps a whole chunk beside its own size, and is cut to size when a single token comes.
        result.window_bytes = sum(h for h, n in zip(held, left, strict=True) if h > n) // passes[0]
        result.pieces = {i: order for i in split if (order := _in_turn(len(split[i]), [c.get(i, []) for c in seen]))}
        states = [a.nbytes for c in _flat(cache) if isinstance(c, ArraysCache) for a in arrays_in(c)]
        result.state_bytes = max(states, default=0)
    finally:
        for unit in units:
            unswap(unit.module)
        for parts in split.values():
            for piece in parts:
                unswap(piece.module)
        for module, items, attributes in before:
            dict.clear(module)
            dict.update(module, items)
            module.__dict__.clear()
            module.__dict__.update(attributes)
    return result


def _in_turn(pieces: int, passes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The order in which a layer calls its pieces if it is one and the same always, each once; else empty."""
    order = tuple(passes[-1][:pieces])
    if sorted(order) != list(range(pieces)):
        return ()
    return order if all(list(calls) == list(order) * (len(calls) // pieces) for calls in passes) else ()


def _held(cache: Sequence[Any]) -> list[int]:
    """Bytes in each part of a model's cache."""
    return [sum(a.nbytes for a in arrays_in(c)) for c in _flat(cache)]


def _growing(caches: Sequence[Any]) -> Iterator[tuple[int, int | None]]:
    """Of caches that hold a key and a value for each token; recurrent states do not grow."""
    for c in _flat(caches):
        keys = getattr(c, "keys", None)
        if isinstance(keys, mx.array) and keys.ndim == 4 and keys.shape[2]:
            most = getattr(c, "max_size", None)
            yield sum(a.nbytes for a in arrays_in(c)) // keys.shape[2], most if isinstance(most, int) and most else None


def _flat(caches: Sequence[Any]) -> Iterator[Any]:
    for c in caches:
        yield from _flat(c.caches) if isinstance(c, CacheList) else [c]


def _stand_ins(weights: Sequence[Sequence[mx.array]], foreign: bool) -> list[list[mx.array]]:
    made: dict[tuple[tuple[int, ...], mx.Dtype], mx.array] = {}

    def make() -> None:
        for arrays in weights:
            for a in arrays:
                if (a.shape, a.dtype) not in made:
                    made[a.shape, a.dtype] = mx.broadcast_to(mx.zeros((1,) * a.ndim, dtype=a.dtype), a.shape)

    if foreign:
        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
    else:
        make()
    return [[made[a.shape, a.dtype] for a in arrays] for arrays in weights]


def put(parameters: Sequence[Parameter], arrays: Sequence[mx.array]) -> None:
    """Make ``arrays`` the values of ``parameters``."""
    for p, a in zip(parameters, arrays, strict=True):
        # Not setattr: a module is a dictionary, and some classes guard their attributes.
        dict.__setitem__(p.module, p.key, a)


def absent(arrays: Sequence[mx.array]) -> list[mx.array]:
    """What stands in for weights that are not in memory: no elements, the same dtypes, so any use fails loudly."""
    return [mx.zeros((0,), dtype=a.dtype) for a in arrays]


Call = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class _Swapped:
    """Mixed in before a module's own class: its calls go through ``call(original, args, kwargs)``."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call: Call = self.__dict__["_outcore_call"]
        return call(super().__call__, args, kwargs)  # type: ignore[misc]


class _SwappedTable(_Swapped):
    """The same for an embedding, of which ``as_linear`` goes through ``product(original, args, kwargs)``."""

    def as_linear(self, *args: Any, **kwargs: Any) -> Any:
        product: Call = self.__dict__["_outcore_product"]
        return product(super().as_linear, args, kwargs)  # type: ignore[misc]


def swap(module: nn.Module, prefix: str, call: Call, product: Call | None = None) -> None:
    """Give ``module`` a subclass of its own class whose calls go through ``call``, ``as_linear`` through ``product``.

    The module object stays: paths, attributes and ``isinstance`` hold, where a proxy would break on type checks.
    """
    cls = type(module)
    names = {"__module__": cls.__module__, "__doc__": cls.__doc__}
    mixed_in = _Swapped if product is None else _SwappedTable
    module.__class__ = type(prefix + cls.__name__, (mixed_in, cls), names)
    module.__dict__["_outcore_call"] = call
    module.__dict__["_outcore_product"] = product


def unswap(module: nn.Module) -> None:
    """Undo ``swap``; nothing happens to a module that is not swapped."""
    cls = type(module)
    if issubclass(cls, _Swapped):
        module.__class__ = cls.__bases__[1]
        module.__dict__.pop("_outcore_call", None)
        module.__dict__.pop("_outcore_product", None)


def arrays_in(*values: Any) -> list[mx.array]:
    """Every array in ``values``: in nested sequences and dictionaries, and in the attributes of caches.

    A cache's attributes rather than its ``state``: that property slices, and what must be evaluated is the buffer.
    """
    found: list[mx.array] = []
    _collect(values, found, set(), 6)
    return found


def _collect(value: Any, found: list[mx.array], seen: set[int], depth: int) -> None:
    if isinstance(value, mx.array):
        found.append(value)
    elif value is None or isinstance(value, str | int | float | nn.Module | type) or depth == 0 or id(value) in seen:
        return
    elif isinstance(value, list | tuple):
        seen.add(id(value))
        for v in value:
            _collect(v, found, seen, depth - 1)
    elif isinstance(value, dict):
        seen.add(id(value))
        for v in value.values():
            _collect(v, found, seen, depth - 1)
    elif hasattr(value, "__dict__") and not callable(value):
        seen.add(id(value))
        for v in vars(value).values():
            _collect(v, found, seen, depth - 1)
