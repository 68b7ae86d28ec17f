"""A quantized model's own high bits as what drafts for it: the layers of which only the low bits are read then."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn

from ..modules.layers import Layer, find_layers
from ..modules.module_tree import named_modules
from ..modules.nested_linear import NestedLinear, nest
from .checkpoint import TensorInfo
from .lazy_model import LazyModel
from .stored_planes import Planes

ENOUGH = 0.75
"""Of a layer's bytes, those whose codes are cut; what else it has stays in memory."""


def cut_modules(layer: Layer, high: int) -> list[tuple[str, nn.QuantizedLinear]]:
    """The modules of a layer, by their paths in it, whose codes have more than ``high`` bits to be cut into; none
    where they are too small a part of it."""
    found = {id(m): (path, m) for path, m in named_modules(layer.module) if _can_be_cut(m, high)}
    nbytes = sum(m.weight.nbytes + m.scales.nbytes + m.biases.nbytes for _, m in found.values())
    return list(found.values()) if nbytes >= ENOUGH * layer.nbytes else []


def _can_be_cut(module: nn.Module, high: int) -> bool:
    if type(module) is not nn.QuantizedLinear or module.mode != "affine" or module.bits <= high:
        return False
    # Of float16 the draft's scales might have no room for a power of two.
    whole = module.weight.ndim == 2 and module.weight.dtype == mx.uint32 and module.weight.shape[0] > 1
    return whole and module.scales.dtype != mx.float16


def _to_cut(lazy: LazyModel, high: int) -> list[tuple[str, nn.QuantizedLinear]]:
    """The modules of all layers, by their paths in the model; without an adapter's."""
    found = [(f"{layer.path}.{path}", m) for layer in find_layers(lazy.model) for path, m in cut_modules(layer, high)]
    return [(path, m) for path, m in found if f"{path}.weight" in lazy.loaded]


def can_be_nested(lazy: LazyModel, high: int) -> bool:
    """Whether the model, which is left as it is, has layers that ``with_nested_layers`` would change."""
    return bool(_to_cut(lazy, high))


def with_nested_layers(lazy: LazyModel, high: int) -> LazyModel | None:
    """The model, which is changed, with layers of which only low bits are read; None if it has none such."""
    loaded, origins, planes = set(lazy.loaded), dict(lazy.origins), dict[str, TensorInfo]()
    modules = _to_cut(lazy, high)
    for path, module in modules:
        bits = module.bits
        nest(module, high)
        loaded -= {f"{path}.weight", f"{path}.scales"}
        loaded.add(f"{path}.low")
        there = origins.pop(f"{path}.weight", None)
        origins.pop(f"{path}.scales", None)
        apart = lazy.decoders.get(there.name) if there is not None else None
        if there is not None and isinstance(apart, Planes) and (apart.bits, apart.high) == (bits, high):
            origins[f"{path}.low"], planes[f"{path}.weight"] = apart.places(there)
    return replace(lazy, origins=origins, loaded=frozenset(loaded), high=high, planes=planes) if modules else None


def nested_modules(model: nn.Module) -> Iterator[tuple[str, NestedLinear]]:
    """By their paths."""
    return ((path, m) for path, m in named_modules(model) if isinstance(m, NestedLinear))


def share_high_bits(model: nn.Module, draft: nn.Module) -> None:
    """Let the model's nested layers use the high bits that the draft has in memory, and the draft all bits of those
    layers that stay there."""
    drafting = dict(named_modules(draft))
    for path, module in nested_modules(model):
        module.share(drafting[path])
        module.settle()
