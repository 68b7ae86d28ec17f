"""Finds where a model can be cut between ranks: which outputs of earlier layers each layer's call uses, what shapes it
returns, and how it changes its caches. With that, a rank can stand in for the layers of other ranks.

The forward pass is built with stand-ins for weights, as for the trace (``modules/trace.py``). Each layer's outputs are
replaced by new arrays of the same shape; the graph shows which of these a later layer's arguments are made from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.models.cache import make_prompt_cache

from outcore.modules.cache_form import FEW
from outcore.modules.hooks import flat, put
from outcore.modules.layers import Layer
from outcore.modules.stand_ins import Casts, restored, stand_ins

from .watched_pass import RESULTS, Advance, Leaf, SeenCall, WatchedPass

BATCH, TOKENS = -1, -2


@dataclass(frozen=True)
class Shape:
    """An array's shape; in ``dims``, ``BATCH`` is the number of sequences and ``TOKENS`` the number of a pass's
    tokens."""

    dims: tuple[int, ...]
    dtype: mx.Dtype

    def of(self, batch: int, tokens: int) -> tuple[int, ...]:
        return tuple(batch if d == BATCH else tokens if d == TOKENS else d for d in self.dims)


@dataclass(frozen=True)
class LayerCall:
    """What a rank must know about the call of another rank's layer.

    Attributes:
        outputs: the call's return value, with ``...`` in place of each array.
        leaves: the shapes of these arrays; None: sequences and tokens do not determine it, so the array cannot be sent.
        sized_by: an argument, and which of its dimensions are the numbers of sequences and tokens; None: none is.
        advances: the call's changes to its caches.
        uses: outputs of other layers that the call's arguments are made from.
    """

    outputs: Any
    leaves: tuple[Shape | None, ...]
    sized_by: tuple[int | str, int, int] | None
    advances: tuple[Advance, ...]
    uses: frozenset[Leaf] = frozenset()


@dataclass(frozen=True)
class Cuts:
    """Where a model can be cut.

    Attributes:
        order: the layers in the order of their calls.
        results: outputs of layers that the logits are made from.
        groups: layers that must lie on one rank; each layer is in one group, in the order of calls.
        users: for each cache, by its number, the layers whose calls get it.
        refusal: why the model cannot be cut; None if it can.
    """

    order: tuple[int, ...] = ()
    calls: Mapping[int, LayerCall] = field(default_factory=dict)
    results: frozenset[Leaf] = frozenset()
    groups: tuple[tuple[int, ...], ...] = ()
    users: Mapping[int, frozenset[int]] = field(default_factory=dict)
    refusal: str | None = None


def find_cuts(
    model: nn.Module, layers: Sequence[Layer], tables: Sequence[Layer], cast: Casts, *, evaluates: bool
) -> Cuts:
    """Builds a forward pass of a few tokens and one of one token, and finds where the model can be cut.

    Args:
        cast: as in ``modules.trace``.
        evaluates: whether the model evaluates arrays inside its forward pass.
    """
    if len(layers) < 2:
        return Cuts(refusal="fewer than two of its layers have weights in the checkpoint; others may be an adapter's")
    units = [*layers, *tables]
    arrays = stand_ins(units, cast, foreign=not evaluates)
    passes: list[WatchedPass] = []
    with restored(model):
        for unit, mine in zip(units, arrays, strict=True):
            put(unit.parameters, mine)
        try:
            cache = make_prompt_cache(model)
            for tokens in (FEW, 1):
                passes.append(WatchedPass(layers, evaluates=evaluates))
                with passes[-1].watching():
                    logits = model(mx.zeros((1, tokens), dtype=mx.int32), cache=cache)
                passes[-1].ask(RESULTS, [logits])
        except Exception as e:  # a model's code may raise anything
            return Cuts(refusal=f"its forward pass cannot be built ({type(e).__name__}: {e})")
    return _cuts(passes, flat(cache), len(layers))


def _cuts(passes: Sequence[WatchedPass], caches: Sequence[Any], layers: int) -> Cuts:
    first, second = passes
    order = tuple(first.order)
    if len(set(order)) < len(order) or order != tuple(second.order) or len(order) < layers:
        return Cuts(refusal="it does not call its layers one by one, each once, in one order")
    calls = {i: _layer_call(first.seen[i], second.seen[i], first.uses[i] | second.uses[i]) for i in order}
    numbers = {id(c): n for n, c in enumerate(caches)}
    users: dict[int, set[int]] = {}
    owners: dict[int, list[int]] = {}  # the layers that get each object that may hold arrays, such as a cache
    for i in order:
        for key in {id(c) for c in first.seen[i].caches}:
            owners.setdefault(key, []).append(i)
            if key in numbers:
                users.setdefault(numbers[key], set()).add(i)
        for key in first.seen[i].objects:
            owners.setdefault(key, []).append(i)
    together: list[Sequence[int]] = list(owners.values())
    # A layer must be with another if it uses an output of that layer that cannot be sent.
    together += [[i, layer] for i in order for layer, n in calls[i].uses if calls[layer].leaves[n] is None]
    together += [[i, other] for i in order for other in first.peeks[i] | second.peeks[i]]
    together += [order[order.index(i) :] for i in order if first.seen[i].opaque or calls[i].sized_by is None]
    groups = _joined(order, together)
    refusal = "its layers pass more to each other than arrays of the pass" if len(groups) < 2 else None
    results = first.uses[RESULTS] | second.uses[RESULTS]
    if any(calls[i].leaves[n] is None for i, n in results) or first.peeks[RESULTS] | second.peeks[RESULTS]:
        refusal = "its results are made from what a layer stores in its caches"
    return Cuts(order, calls, results, groups, {n: frozenset(u) for n, u in users.items()}, refusal)


def _joined(order: Sequence[int], together: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    group = {i: {i} for i in order}
    for layers in together:
        for i in layers[1:]:
            if group[i] is not group[layers[0]]:
                group[layers[0]] |= group[i]
                for k in group[i]:
                    group[k] = group[layers[0]]
    found = {id(group[i]): tuple(k for k in order if k in group[i]) for i in order}
    return tuple(found.values())


def _layer_call(a: SeenCall, b: SeenCall, uses: frozenset[Leaf]) -> LayerCall:
    leaves = tuple(_shape(x, y) for x, y in zip(a.leaves, b.leaves, strict=True))
    sized_by = None
    for place, shape in a.given.items():
        dims = _dims(shape, b.given.get(place, ()))
        if dims is not None and BATCH in dims and TOKENS in dims:
            sized_by = (place, dims.index(BATCH), dims.index(TOKENS))
            break
    template = tree_map(lambda value: ... if isinstance(value, mx.array) else value, a.outputs)
    return LayerCall(template, leaves, sized_by, a.advances, uses)


def _shape(few: mx.array, one: mx.array) -> Shape | None:
    dims = _dims(tuple(few.shape), tuple(one.shape))
    return None if dims is None or few.dtype != one.dtype else Shape(dims, few.dtype)


def _dims(few: tuple[int, ...], one: tuple[int, ...]) -> tuple[int, ...] | None:
    """Compares a shape in the passes of ``FEW`` tokens and of one. Returns it with ``BATCH`` and ``TOKENS``; None if
    anything but the number of tokens changes it."""
    if len(few) != len(one):
        return None
    dims = [TOKENS if (a, b) == (FEW, 1) else a if a == b else 0 for a, b in zip(few, one, strict=True)]
    if 0 in dims:
        return None
    if 1 in dims:
        dims[dims.index(1)] = BATCH
    return tuple(dims)


def filled(template: Any, arrays: Iterator[mx.array]) -> Any:
    return tree_map(lambda value: next(arrays) if value is ... else value, template)
