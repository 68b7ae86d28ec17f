"""Models that read only the low bits of their weights, as a draft has the high bits in memory, until it is given up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import mlx.nn as nn

from outcore.checkpoint.checkpoint import TensorInfo
from outcore.checkpoint.lazy_model import DTYPES, LazyModel
from outcore.checkpoint.manifest import PLANES
from outcore.checkpoint.packed_store import open_again, open_copy
from outcore.decode.opening import Opening
from outcore.engine.layer_sizes import on_cuda_size, weighed
from outcore.engine.model_profile import LayerParts, ModelProfile
from outcore.errors import UnsupportedModelError
from outcore.machine.device import on_cuda
from outcore.modules.layers import Layer, Parameter, find_layers, named_modules
from outcore.plan.partition import LayerSize
from outcore_packs.stored_planes import Planes, cut_modules

from .nested_linear import NestedLinear, nest

# The parameters of a draft's module that are not the model's.
KEYS = ("weight", "scales")


def nested(profile: ModelProfile, high: int, opening: Opening) -> ModelProfile:
    """Returns the model's profile with layers that read only low bits; the ``high`` high bits are the draft's. Returns
    ``profile`` itself if experts can be read one by one, if a layer's codes are used from outside, and in float16. Uses
    a cached copy that stores high and low bits apart, if there is one (not with mirrors of the original folder)."""
    o, size = opening.options, profile.size
    streamable = [each.streamable for each in size.layers]
    # In float16 a draft's scales could be denormal and round differently from the model's.
    if o.dtype == "float16" or not any(streamable) or profile.trace.evaluates:
        return profile
    if any(each.experts is not None for each in size.layers):
        return profile
    if not _to_cut(profile.lazy, high):  # checked first, as opening the model again is slow
        return profile
    apart = None if o.mirrors else open_copy(opening.folder, f"{PLANES}:{high}", **profile.lazy.arguments)
    lazy = with_nested_layers(apart or open_again(profile.lazy), high)
    try:
        found = opening.measured(lazy)
    except UnsupportedModelError:  # an adapter's module (DoRA) uses the weights of the module that it wraps
        return profile
    if [each.streamable for each in found.size.layers] != streamable:
        return profile
    layers = tuple(replace(n, kind=p.kind) for n, p in zip(found.size.layers, size.layers, strict=True))
    return replace(found, size=replace(found.size, layers=layers))


def _to_cut(lazy: LazyModel, high: int) -> list[tuple[str, nn.QuantizedLinear]]:
    """Returns the layers' modules whose codes can be cut into high and low bits, by path; none of an adapter's."""
    found = [(f"{layer.path}.{path}", m) for layer in find_layers(lazy.model) for path, m in cut_modules(layer, high)]
    return [(path, m) for path, m in found if f"{path}.weight" in lazy.loaded]


def with_nested_layers(lazy: LazyModel, high: int) -> LazyModel:
    """Changes the model's layers so that they read only low bits. Returns ``lazy`` itself if no module can be cut."""
    loaded, origins = set(lazy.loaded), dict(lazy.origins)
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
            origins[f"{path}.low"], _ = apart.places(there)
    if not modules:
        return lazy
    reshape = partial(with_nested_layers, high=high)
    return replace(lazy, origins=origins, loaded=frozenset(loaded), reshape=reshape)


def nested_modules(model: nn.Module) -> Iterator[tuple[str, NestedLinear]]:
    return ((path, m) for path, m in named_modules(model) if isinstance(m, NestedLinear))


def high_planes(lazy: LazyModel) -> dict[str, TensorInfo]:
    """Returns, by weight path, where on disk the high bits of nested layers are stored separately."""
    found = {}
    for path, _ in nested_modules(lazy.model):
        if (low := lazy.origins.get(f"{path}.low")) is not None:
            name = low.name.removesuffix(".low")
            planes = lazy.decoders[name]
            assert isinstance(planes, Planes)
            _, found[f"{path}.weight"] = planes.places(lazy.checkpoint.tensors[name])
    return found


def share_high_bits(model: nn.Module, draft: nn.Module) -> None:
    """Makes the model's nested layers use the high bits that the draft has in memory. In layers that stay in memory,
    codes are joined once, and the draft uses all their bits."""
    drafting = dict(named_modules(draft))
    for path, module in nested_modules(model):
        module.share(drafting[path])
        module.settle()


# A file's inode, size in bytes, and time of the last change in nanoseconds.
Stamp = tuple[int, int, int]


def file_stamps(tensors: Mapping[str, TensorInfo]) -> dict[Path, Stamp | None]:
    """Returns a stamp of each tensor's file, which changes if the file is replaced or written to; None: no file."""
    stamps: dict[Path, Stamp | None] = {}
    for file in {tensor.file for tensor in tensors.values()}:
        try:
            found = file.stat()
        except OSError:
            stamps[file] = None
        else:
            stamps[file] = (found.st_ino, found.st_size, found.st_mtime_ns)
    return stamps


def high_bits_streamed(profile: ModelProfile, where: Mapping[str, TensorInfo]) -> ModelProfile:
    """Returns a profile of the same model that also reads the high bits, for after the draft was given up. Changes
    nothing.

    Args:
        profile: of a model with nested layers that share a draft's high bits.
        where: the draft's tensors on disk, by path in the model.
    """
    place = replace(profile.place, where={**profile.place.where, **where})
    grown = [_grown(layer, parts, where) for layer, parts in zip(profile.layers, profile.parts, strict=True)]
    parts = (p if p.unit is None else replace(p, unit=place.unit(layer)) for layer, p in grown)
    profile = replace(profile, place=place, layers=tuple(layer for layer, _ in grown), parts=tuple(parts))
    sizes = tuple(_size(profile, i, size) for i, size in enumerate(profile.size.layers))
    return replace(profile, size=replace(profile.size, layers=sizes))


def _grown(layer: Layer, parts: LayerParts, where: Mapping[str, TensorInfo]) -> tuple[Layer, LayerParts]:
    """Adds the high bits to a layer's parameters. The slot then has all bits of nested modules' codes: each call joins
    them, and no decoder does. Other parameters are decoded as before."""
    parameters, casts = list(layer.parameters), list(parts.casts)
    owners = {id(p.module): n for n, p in enumerate(parameters)}
    numbers = [list(piece.parameters) for piece in parts.pieces]
    for path, module in named_modules(layer.module):
        if not isinstance(module, NestedLinear) or module.coarse is None or id(module) not in owners:
            continue
        mine = next((own for own in numbers if owners[id(module)] in own), None)
        for key in KEYS:
            if mine is not None:
                mine.append(len(parameters))
            parameters.append(Parameter(f"{path}.{key}", module.coarse, key))
            # The same cast as when the draft was loaded.
            dtype, stored = module.coarse[key].dtype, DTYPES[where[f"{layer.path}.{path}.{key}"].dtype]
            casts.append(None if dtype == stored else dtype)
    pieces = tuple(replace(p, parameters=tuple(n)) for p, n in zip(parts.pieces, numbers, strict=True))
    kept = (None if isinstance(d, NestedLinear) else d for d in parts.decoders)
    decoders = (*kept, *(None,) * (len(parameters) - len(layer.parameters)))
    parts = replace(parts, pieces=pieces, casts=tuple(casts), decoders=decoders)
    return Layer(layer.path, layer.module, tuple(parameters)), parts


def _size(profile: ModelProfile, i: int, size: LayerSize) -> LayerSize:
    whole, parts = weighed(profile.layers[i], profile.parts[i].pieces, profile.parts[i].casts, profile.place)
    pieces = tuple(replace(p, out=b.out, block=b.block) for p, b in zip(parts, size.pieces, strict=True))
    size = replace(size, resident=whole.resident, slot=whole.slot, read=whole.read, cast=whole.cast, pieces=pieces)
    return on_cuda_size(size, profile.copies) if on_cuda() else size
