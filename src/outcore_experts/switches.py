"""Finds the routed experts of a model's layers: mlx-lm's switch modules (``mlx_lm.models.switch_layers``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

from outcore.modules.layers import Layer, Parameter, Projection, is_matrix, modules, named_modules

# Class attribute of a switch that the model calls otherwise, and that then calls itself with hidden states and indices:
# it may hold its router.
ROUTES = "outcore_routes"


@dataclass(frozen=True)
class Switch:
    """A module that is called with hidden states and each token's expert indices.

    Attributes:
        pieces: numbers of the layer's pieces that hold the switch's weights.
        streamed: numbers of the layer's parameters that are stacked by expert.
        held: parameters by expert that stay in memory: a scale for each expert, an adapter's arrays. Paths begin at the
            layer.
    """

    module: nn.Module
    experts: int
    pieces: tuple[int, ...]
    streamed: tuple[int, ...]
    held: tuple[Parameter, ...] = ()


def switches_in(layer: Layer) -> list[nn.Module]:
    found = {id(m): m for m in modules(layer.module) if isinstance(m, SwitchGLU | SwitchMLP)}
    return list(found.values())


def find_switch(layer: Layer, pieces: Sequence[Projection]) -> Switch | None:
    """Returns a layer's switch; None if the layer has none or several, or if experts cannot be read one by one: they
    share a piece with other weights, are not stacked by expert, or are all in memory (an adapter's)."""
    found = switches_in(layer)
    if len(found) != 1:
        return None
    (module,) = found
    numbered = {id(m) for m in modules(module) if m is module or _by_expert(m)}
    inside = numbered if hasattr(type(module), ROUTES) else {id(m) for m in modules(module)}
    streamed = [n for n, p in enumerate(layer.parameters) if id(p.module) in inside]
    matrices = [layer.parameters[n] for n in streamed]
    on_disk = {(id(p.module), p.key) for p in matrices}
    here = [
        Parameter(f"{path}.{key}", m, key)
        for path, m in named_modules(layer.module)
        for key, value in m.items()
        if id(m) in inside and isinstance(value, mx.array) and (id(m), key) not in on_disk
    ]
    matrices += [p for p in here if is_matrix(p.array)]
    counts = {p.array.shape[0] for p in matrices}
    mine = [n for n, piece in enumerate(pieces) if set(piece.parameters) & set(streamed)]
    covered = {number for n in mine for number in pieces[n].parameters}
    if not streamed or len(counts) != 1 or covered != set(streamed):
        return None
    (experts,) = counts
    held = [p for p in here if is_matrix(p.array) or (p.array.shape == (experts,) and id(p.module) in numbered)]
    return Switch(module, experts, tuple(mine), tuple(streamed), tuple(held))


def block_of(layer: Layer, switch: Switch) -> nn.Module | None:
    """Returns the module that contains the router and calls the switch, or is it; None if that is the layer itself."""
    for module in modules(layer.module):
        if module is not layer.module and any(m is switch.module for m in module.children().values()):
            return module
    return switch.module if hasattr(type(switch.module), ROUTES) else None


def routers_of(layer: Layer, pieces: Sequence[Projection], switch: Switch) -> tuple[int, ...]:
    """Returns the pieces, in call order, that the module which calls the switch uses before it; empty if that is the
    layer itself."""
    block = block_of(layer, switch)
    inside = set[int]() if block is None else {id(m) for m in modules(block)}
    return tuple(n for n, piece in enumerate(pieces) if n < switch.pieces[0] and id(piece.module) in inside)


def _by_expert(module: nn.Module) -> bool:
    """Whether a module has a matrix for each expert, so that a vector of that length is one number for each expert."""
    weight = module.get("weight")
    return isinstance(weight, mx.array) and weight.ndim == 3
