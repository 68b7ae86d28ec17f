"""Lists a model's modules and arrays by path, and finds its layers from the module tree, never from the model type.

A layer list is any list of modules in the module tree, under any name (``layers``, ``h``, ``blocks``, nested, or
returned by a property). Only a trace shows which layers cannot be streamed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear


# The same as ``model.named_modules()`` in a quarter of the time: MLX builds and flattens trees. A load calls this and
# ``named_parameters`` sixty times.
def named_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    found: list[tuple[str, nn.Module]] = []
    left: list[tuple[str, nn.Module]] = [("", model)]
    while left:
        path, module = left.pop()
        found.append((path, module))
        for key, value in module.items():
            if isinstance(value, (dict, list)):
                _modules_in(value, f"{path}.{key}" if path else key, left)
    return found


def modules(model: nn.Module) -> list[nn.Module]:
    return [module for _, module in named_modules(model)]


def named_parameters(model: nn.Module) -> list[tuple[str, mx.array]]:
    found: list[tuple[str, mx.array]] = []
    _arrays_in(model, "", found)
    return found


def _modules_in(value: Any, path: str, found: list[tuple[str, nn.Module]]) -> None:
    if isinstance(value, nn.Module):
        found.append((path, value))
        return
    for key, inside in enumerate(value) if isinstance(value, list) else value.items():
        if isinstance(inside, (dict, list)):
            _modules_in(inside, f"{path}.{key}", found)


def _arrays_in(value: Any, path: str, found: list[tuple[str, mx.array]]) -> None:
    hides = isinstance(value, nn.Module)  # a module's names that begin with _ are no parameters
    for key, inside in enumerate(value) if isinstance(value, list) else value.items():
        if hides and str(key).startswith("_"):
            continue
        here = f"{path}.{key}" if path else str(key)
        if isinstance(inside, mx.array):
            found.append((here, inside))
        elif isinstance(inside, (dict, list)):
            _arrays_in(inside, here, found)


@dataclass(frozen=True)
class Parameter:
    """One parameter of a layer: ``module[key]``. ``path``: dotted path from the layer to it."""

    path: str
    module: nn.Module
    key: str

    @property
    def array(self) -> mx.array:
        return self.module[self.key]


@dataclass(frozen=True)
class Layer:
    path: str
    module: nn.Module
    parameters: tuple[Parameter, ...]

    @property
    def nbytes(self) -> int:
        return sum(p.array.nbytes for p in self.parameters)


@dataclass(frozen=True)
class Projection:
    """A piece of a layer: a module with weights, and the modules below it. Usually a projection. The smallest part that
    can be resident or streamed by itself.

    Attributes:
        parameters: indices into the layer's parameters.
    """

    module: nn.Module
    parameters: tuple[int, ...]


# Class attribute of a module that is one piece with all below it, as its code calls those in an order of its own.
PIECE = "outcore_piece"


def find_pieces(layer: Layer) -> tuple[Projection, ...]:
    """Return a layer's pieces in tree order. Each parameter of the layer belongs to exactly one."""
    owners = {id(m): m for m in modules(layer.module) if hasattr(type(m), PIECE)}
    owners |= {id(p.module): p.module for p in layer.parameters}
    below = {key: {id(m) for m in modules(owner)} for key, owner in owners.items()}
    outer = [m for key, m in owners.items() if not any(key in below[k] for k in owners if k != key)]
    return tuple(
        Projection(m, tuple(n for n, p in enumerate(layer.parameters) if id(p.module) in below[id(m)])) for m in outer
    )


def find_layers(model: nn.Module) -> list[Layer]:
    """Return every module of every layer list, in tree order. Lists inside layers are not searched.

    Vectors (norms, biases, projections to one number) are not among a layer's ``parameters``: they stay resident, which
    takes almost no memory, and some models read a neighbouring layer's norm.
    """
    found: dict[int, Layer] = {}
    _walk(model, "", found, set())
    return list(found.values())


EMBEDDINGS = (nn.Embedding, nn.QuantizedEmbedding)
TABLES = (*EMBEDDINGS, nn.Linear, nn.QuantizedLinear)


def find_tables(model: nn.Module, layers: Sequence[Layer]) -> list[Layer]:
    """Return embeddings, which can be read by row, and the linear modules outside all layers, in slices of rows."""
    inside, seen = {id(m) for layer in layers for m in modules(layer.module)}, set[int]()
    found = []
    for path, module in named_modules(model):
        if type(module) in (EMBEDDINGS if id(module) in inside else TABLES) and id(module) not in seen:
            seen.add(id(module))
            parameters = tuple(_parameters(module))
            if parameters:
                found.append(Layer(path, module, parameters))
    return found


def _walk(value: Any, path: str, found: dict[int, Layer], seen: set[int]) -> None:
    for key, inside in enumerate(value) if isinstance(value, list | tuple) else value.items():
        here = f"{path}.{key}" if path else str(key)
        if isinstance(inside, nn.Module):
            if id(inside) not in seen:
                seen.add(id(inside))
                _walk(inside, here, found, seen)
        elif isinstance(inside, list | tuple):
            modules = [(n, m) for n, m in enumerate(inside) if isinstance(m, nn.Module)]
            if len(modules) < 2 or any(_is_leaf(m) for _, m in modules):
                _walk(dict(modules), here, found, seen)
                continue
            for n, m in modules:
                if id(m) not in seen:
                    seen.add(id(m))
                    if parameters := tuple(_parameters(m)):
                        found[id(m)] = Layer(f"{here}.{n}", m, parameters)
        elif isinstance(inside, dict):
            _walk({k: m for k, m in inside.items() if isinstance(m, nn.Module)}, here, found, seen)


# Class attribute: keys of a module's parameters. In a layer with such a module only these parameters are streamed.
STREAMED = "outcore_streamed"


def is_matrix(array: mx.array) -> bool:
    return array.ndim > 1 and not (array.ndim == 2 and array.shape[0] == 1)


def is_stacked(module: nn.Module) -> bool:
    """Whether a module's weights are stacked by expert.

    Such weights must be contiguous. If a checkpoint has two in one tensor, mlx-lm slices it, and sorted gathers (as in
    prompts) from slices return wrong numbers: ``gather_mm`` on CUDA, whose ``ensure_batch_contiguous``
    (mlx/backend/cuda/matmul.cpp, MLX 0.32.4) ignores the first of three dimensions; ``gather_qmm`` on Metal
    (https://github.com/ml-explore/mlx/issues/4055).
    """
    return isinstance(module, SwitchLinear | QuantizedSwitchLinear)


def _is_leaf(module: nn.Module) -> bool:
    # The nearest base class that is not one of this package's subclasses.
    cls = next(c for c in type(module).__mro__ if not c.__module__.startswith(__package__ + "."))
    return cls.__module__.startswith("mlx.nn")


def _parameters(layer: nn.Module) -> Iterator[Parameter]:
    below: dict[int, tuple[str, nn.Module]] = {}
    for path, module in named_modules(layer):
        below.setdefault(id(module), (path, module))
    chosen = any(hasattr(type(m), STREAMED) for _, m in below.values())
    for path, module in below.values():
        for key, value in module.items():
            if chosen and key not in getattr(type(module), STREAMED, ()):
                continue
            if isinstance(value, mx.array) and is_matrix(value) and not key.startswith("_"):
                yield Parameter(f"{path}.{key}" if path else key, module, key)
