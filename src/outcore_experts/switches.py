"""Routed experts of a model's layers: mlx-lm's switches (``mlx_lm.models.switch_layers``), found by class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

from outcore.modules.layers import Layer, Parameter, Projection, is_matrix
from outcore.modules.module_tree import modules, named_modules


@dataclass(frozen=True)
class Switch:
    """A module that is called with hidden states and, for each token, the numbers of its experts.

    Attributes:
        experts: how many it has to choose from.
        pieces: of its layer, those that hold its weights.
        streamed: indices into the layer's parameters; of each the first dimension is that of the experts.
        held: further parameters of which it is, and which stay in memory: a scale for each expert, an adapter's arrays.
            Their paths are from the layer.
    """

    module: nn.Module
    experts: int
    pieces: tuple[int, ...]
    streamed: tuple[int, ...]
    held: tuple[Parameter, ...] = ()


def switches_in(layer: Layer) -> list[nn.Module]:
    """The switches of a layer, by class."""
    found = {id(m): m for m in modules(layer.module) if isinstance(m, SwitchGLU | SwitchMLP)}
    return list(found.values())


def find_switch(layer: Layer, pieces: Sequence[Projection]) -> Switch | None:
    """The switch of a layer; None if it has none, several, or one of which experts cannot be taken apart: whose weights
    share a piece with others, or are not stacked by expert, or are all in memory (an adapter's)."""
    found = switches_in(layer)
    if len(found) != 1:
        return None
    (module,) = found
    inside = {id(m) for m in modules(module)}
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
    held = [p for p in here if is_matrix(p.array) or (p.array.shape == (experts,) and _by_expert(p.module))]
    return Switch(module, experts, tuple(mine), tuple(streamed), tuple(held))


def block_of(layer: Layer, switch: Switch) -> nn.Module | None:
    """The module inside of a layer that routes and calls its switch; None if that is the layer itself."""
    for module in modules(layer.module):
        if module is not layer.module and any(m is switch.module for m in module.children().values()):
            return module
    return None


def _by_expert(module: nn.Module) -> bool:
    """Whether a module has a matrix for each expert, so that a vector as long as there are of them is one by expert,
    and not by chance as wide as that."""
    weight = module.get("weight")
    return isinstance(weight, mx.array) and weight.ndim == 3
