"""A quantized model's own high bits as what drafts for it: the layers of which only the low bits are read then."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import mlx.nn as nn

from outcore_packs.stored_planes import Planes, cut_modules

from ..modules.layers import find_layers
from ..modules.module_tree import named_modules
from ..modules.nested_linear import NestedLinear, nest
from .checkpoint import TensorInfo
from .lazy_model import LazyModel


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
