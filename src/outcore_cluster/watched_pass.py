"""A forward pass that records each layer's call: its arguments, its outputs, and what it does to its caches.

Each layer's outputs are replaced by arrays of the same shape, so that MLX's own print of the graph shows which of them
later arguments are made from.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import ArraysCache, CacheList

from outcore.modules.hooks import arrays_in, caches_in, swap, unswap
from outcore.modules.layers import Layer
from outcore.modules.mlx_lm_compat import BaseCache

# A layer, and the number of one of its output arrays.
Leaf = tuple[int, int]

# In place of a layer's number: the logits.
RESULTS = -1


@dataclass(frozen=True)
class Advance:
    """A change that a layer's call makes to one of its caches.

    Attributes:
        cache: the cache's number among the caches that the call gets.
        tokens: whether the call stores keys and values of the pass's tokens.
        entries: which entries of an ``ArraysCache`` it replaces. ``counted``: whether it advances that cache.
    """

    cache: int
    tokens: bool = False
    entries: tuple[int, ...] = ()
    counted: bool = False


@dataclass
class SeenCall:
    """One call of a layer: the shapes of its array arguments by position or name, its outputs, and what it wrote.
    ``opaque``: an output is an object that may hold arrays."""

    given: dict[int | str, tuple[int, ...]]
    caches: list[Any]
    objects: list[int]  # ids of arguments that may hold arrays
    outputs: Any
    leaves: list[mx.array]
    opaque: bool
    advances: tuple[Advance, ...]
    kept: list[mx.array]  # the arrays in its caches afterwards


class WatchedPass:
    """Records a pass. ``evaluates``: the model evaluates arrays in it, which then forget what they were made from.

    Attributes:
        uses: by layer, the outputs that its arguments are made from; of ``RESULTS``, those that the logits are.
        peeks: by layer, the other layers whose cache entries they are made from.
    """

    def __init__(self, layers: Sequence[Layer], *, evaluates: bool) -> None:
        self.order: list[int] = []
        self.seen: dict[int, SeenCall] = {}
        self.uses: dict[int, frozenset[Leaf]] = {}
        self.peeks: dict[int, frozenset[int]] = {}
        self._layers, self._evaluates = layers, evaluates
        self._counted: set[int] = set()
        self._asked: dict[int, list[mx.array]] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        advance = ArraysCache.advance

        def counted(cache: Any, tokens: int) -> None:
            self._counted.add(id(cache))
            advance(cache, tokens)

        for i, layer in enumerate(self._layers):
            swap(layer.module, "Watched", self._call(i))
        ArraysCache.advance = counted
        try:
            yield
        finally:
            ArraysCache.advance = advance
            for layer in self._layers:
                unswap(layer.module)

    def ask(self, layer: int, arrays: Sequence[mx.array]) -> None:
        """Asks what the arguments of a layer, or ``RESULTS``, are made from. All is answered by one print of the graph
        at the pass's end, as the graph grows with each layer; or at once where it may be evaluated before."""
        # ``stop_gradient`` adds a node for each, as an output may be passed on unchanged.
        self._asked[layer] = [mx.stop_gradient(a) for a in arrays]
        if layer == RESULTS or self._evaluates:
            self._answer()

    def _answer(self) -> None:
        names = {f"OUT{i}_{n}": a for i, seen in self.seen.items() for n, a in enumerate(seen.leaves)}
        names |= {f"KEPT{i}_{n}": a for i, seen in self.seen.items() for n, a in enumerate(seen.kept)}
        asked = {i: {f"ASKED{i}_{n}": a for n, a in enumerate(arrays)} for i, arrays in self._asked.items()}
        behind = _behind({k: v for each in (names, *asked.values()) for k, v in each.items()})
        for i, mine in asked.items():
            found = [_NAMED.fullmatch(name) for name in _ancestors(behind, mine)]
            self.uses[i] = frozenset((int(m[2]), int(m[3])) for m in found if m is not None and m[1] == "OUT")
            self.peeks[i] = frozenset(int(m[2]) for m in found if m is not None and m[1] == "KEPT") - {i}
        self._asked.clear()

    def _call(self, layer: int) -> Callable[..., Any]:
        def call(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            given = {**dict(enumerate(args)), **kwargs}
            arrays = [v for _, v in tree_flatten(list(given.values())) if isinstance(v, mx.array)]
            objects = _objects(given.values())
            self.ask(layer, arrays)
            caches = caches_in(args, kwargs)
            before = [_held(c) for c in caches]
            self._counted.clear()
            out = original(*args, **kwargs)
            advances = tuple(
                a for n, c in enumerate(caches) if (a := _advance(n, before[n], c, id(c) in self._counted)) is not None
            )
            leaves: list[mx.array] = []

            def replacement(value: Any) -> Any:
                if not isinstance(value, mx.array):
                    return value
                leaves.append(mx.zeros(value.shape, dtype=value.dtype))
                return leaves[-1]

            replaced = tree_map(replacement, out)
            shapes = {k: tuple(v.shape) for k, v in given.items() if isinstance(v, mx.array)}
            opaque = bool(_objects([out]))
            self.order.append(layer)
            kept = arrays_in(caches)
            self.seen[layer] = SeenCall(shapes, caches, objects, replaced, leaves, opaque, advances, kept)
            return replaced

        return call


_NAMED = re.compile(r"(OUT|KEPT)(\d+)_(\d+)")


def _behind(names: Mapping[str, mx.array]) -> dict[str, list[str]]:
    """Returns the graph of these arrays: for each node, those that it is made from."""
    graph = io.StringIO()
    mx.export_to_dot(graph, **names)
    behind: dict[str, list[str]] = {}
    for line in graph.getvalue().splitlines():
        a, arrow, b = line.partition(" -> ")
        if arrow:
            behind.setdefault(b.strip('"'), []).append(a.strip('"'))
    return behind


def _ancestors(behind: Mapping[str, Sequence[str]], of: Iterable[str]) -> set[str]:
    """From the nodes ``of``, follows the graph back to the first layer's output or cache entry on each path; returns
    the names passed."""
    found, ahead = set[str](), [n for name in of for n in behind.get(name, [])]
    while ahead:
        if (node := ahead.pop()) not in found:
            found.add(node)
            ahead += [] if _NAMED.fullmatch(node) else behind.get(node, [])
    return found


def _objects(values: Any) -> list[int]:
    """Returns the ids of arguments through which layers may pass arrays to later ones: all but arrays, caches and plain
    values."""
    found: list[int] = []
    for v in values:
        if isinstance(v, list | tuple):
            found += _objects(v)
        elif not (v is None or isinstance(v, mx.array | str | int | float | BaseCache | CacheList | mx.Dtype)):
            found.append(id(v))
    return found


def _held(cache: Any) -> tuple[Any, list[Any]]:
    entries = list(cache.cache) if isinstance(cache, ArraysCache) else []
    offset = getattr(cache, "offset", None)
    return offset, entries


def _advance(number: int, before: tuple[Any, list[Any]], cache: Any, counted: bool) -> Advance | None:
    offset, entries = _held(cache)
    written = tuple(n for n, (a, b) in enumerate(zip(before[1], entries, strict=True)) if a is not b)
    moved = isinstance(offset, int) and offset != before[0]
    return Advance(number, moved, written, counted) if moved or written or counted else None
