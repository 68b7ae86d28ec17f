"""A forward pass of which each layer's call is watched: what it is given, what it puts out, what it does to caches.

What a layer puts out is replaced by arrays of its shape, so that MLX's own print of the graph tells which of them later
arguments are made from.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import ArraysCache, CacheList

from outcore.modules.call_values import caches_in
from outcore.modules.hooks import arrays_in, swap, unswap
from outcore.modules.layers import Layer
from outcore.modules.mlx_lm_compat import BaseCache

Leaf = tuple[int, int]
"""A layer, and the number of one of the arrays that it puts out."""


@dataclass(frozen=True)
class Advance:
    """What a layer's call does to one of the caches that it is given.

    Attributes:
        cache: its number among those.
        tokens: keys and values of the pass's tokens go into it.
        entries: of an ``ArraysCache``, those that it replaces; ``counted``: and it says how many tokens passed.
    """

    cache: int
    tokens: bool = False
    entries: tuple[int, ...] = ()
    counted: bool = False


@dataclass
class SeenCall:
    """One call of a layer: its array arguments by their places, what it returned and wrote."""

    given: dict[int | str, tuple[int, ...]]
    caches: list[Any]
    objects: list[int]  # ids of arguments that arrays may hide in
    outputs: Any
    leaves: list[mx.array]
    opaque: bool
    advances: tuple[Advance, ...]
    uses: frozenset[Leaf]
    peeks: frozenset[int]  # layers of which it uses what they wrote to their caches
    kept: list[mx.array]  # that


class WatchedPass:
    """A forward pass that is built with each layer's outputs replaced."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.order: list[int] = []
        self.seen: dict[int, SeenCall] = {}
        self.results: frozenset[Leaf] = frozenset()
        self.peeks: frozenset[int] = frozenset()
        self._layers = layers
        self._counted: set[int] = set()

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

    def made_from(self, arrays: Sequence[mx.array]) -> tuple[frozenset[Leaf], frozenset[int]]:
        """Which outputs of layers these arrays are made from, and what which layers wrote to their caches."""
        if not arrays:
            return frozenset(), frozenset()
        names = {f"OUT{i}_{n}": a for i, seen in self.seen.items() for n, a in enumerate(seen.leaves)}
        names |= {f"KEPT{i}_{n}": a for i, seen in self.seen.items() for n, a in enumerate(seen.kept)}
        # By an operation of their own, so that an output that is passed on as it is has something behind it, too.
        asked = {f"ASKED{n}": mx.stop_gradient(a) for n, a in enumerate(arrays)}
        found = [_NAMED.fullmatch(name) for name in _ancestors({**names, **asked}, list(asked))]
        outputs = frozenset((int(m[2]), int(m[3])) for m in found if m is not None and m[1] == "OUT")
        return outputs, frozenset(int(m[2]) for m in found if m is not None and m[1] == "KEPT")

    def _call(self, layer: int) -> Callable[..., Any]:
        def call(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            given = {**dict(enumerate(args)), **kwargs}
            arrays = [v for _, v in tree_flatten(list(given.values())) if isinstance(v, mx.array)]
            objects = _objects(given.values())
            (uses, peeks), caches = self.made_from(arrays), caches_in(args, kwargs)
            before = [_held(c) for c in caches]
            self._counted.clear()
            out = original(*args, **kwargs)
            advances = tuple(
                a for n, c in enumerate(caches) if (a := _advance(n, before[n], c, id(c) in self._counted)) is not None
            )
            leaves: list[mx.array] = []

            def other(value: Any) -> Any:
                """An array of the same shape, which is noted."""
                if not isinstance(value, mx.array):
                    return value
                leaves.append(mx.zeros(value.shape, dtype=value.dtype))
                return leaves[-1]

            replaced = tree_map(other, out)
            shapes = {k: tuple(v.shape) for k, v in given.items() if isinstance(v, mx.array)}
            opaque = bool(_objects([out]))
            self.order.append(layer)
            kept = arrays_in(caches)
            self.seen[layer] = SeenCall(
                shapes, caches, objects, replaced, leaves, opaque, advances, uses, peeks - {layer}, kept
            )
            return replaced

        return call


_NAMED = re.compile(r"(OUT|KEPT)(\d+)_(\d+)")


def _ancestors(names: Mapping[str, mx.array], of: Sequence[str]) -> set[str]:
    """The names of arrays that these are made from, up to the first that have one of ``names``."""
    graph = io.StringIO()
    mx.export_to_dot(graph, **names)
    behind: dict[str, list[str]] = {}
    for line in graph.getvalue().splitlines():
        a, arrow, b = line.partition(" -> ")
        if arrow:
            behind.setdefault(b.strip('"'), []).append(a.strip('"'))
    found, ahead = set[str](), [n for name in of for n in behind.get(name, [])]
    while ahead:
        if (node := ahead.pop()) not in found:
            found.add(node)
            ahead += [] if _NAMED.fullmatch(node) else behind.get(node, [])
    return found


def _objects(values: Any) -> list[int]:
    """What is neither an array, a cache nor a plain value: arrays may go from layer to layer in it."""
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
