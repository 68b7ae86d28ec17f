"""A model whose draft is given up: the high bits of its layers' codes, which were in memory as the draft's, are read
with the low ones from then on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import mlx.core as mx

from ..checkpoint.checkpoint import ITEM_BYTES, TensorInfo
from ..checkpoint.lazy_model import DTYPES, Decoder
from ..machine.device import on_cuda
from ..modules.layers import Layer, Parameter, Projection
from ..modules.module_tree import named_modules
from ..modules.nested_linear import NestedLinear
from ..plan.model_size import UNDER_WAY
from ..plan.partition import LayerSize, PieceSize
from .layer_sizes import on_cuda_size, part_of, ranges
from .model_profile import ModelProfile

KEYS = ("weight", "scales")
"""What a draft's layer has of its own."""


def high_bits_streamed(profile: ModelProfile, where: Mapping[str, TensorInfo]) -> ModelProfile:
    """The profile of the same model, whose layers' units have the high bits, too. Nothing is changed.

    Args:
        profile: of a model with nested layers that share a draft's high bits.
        where: the draft's tensors on disk, by their paths in the model.
    """
    place = replace(profile.place, where={**profile.place.where, **where})
    grown = [_grown(*each, where) for each in zip(profile.layers, profile.pieces, profile.casts, strict=True)]
    profile = replace(
        profile,
        place=place,
        layers=tuple(layer for layer, _, _ in grown),
        pieces=tuple(pieces for _, pieces, _ in grown),
        casts=tuple(casts for _, _, casts in grown),
        decoders=tuple(_decoders(layer, d) for (layer, _, _), d in zip(grown, profile.decoders, strict=True)),
    )
    units = (u if u is None else place.unit(layer) for u, layer in zip(profile.units, profile.layers, strict=True))
    sizes = tuple(_size(profile, i, size) for i, size in enumerate(profile.size.layers))
    return replace(profile, units=tuple(units), size=replace(profile.size, layers=sizes))


def _grown(
    layer: Layer, pieces: Sequence[Projection], casts: Sequence[mx.Dtype | None], where: Mapping[str, TensorInfo]
) -> tuple[Layer, tuple[Projection, ...], tuple[mx.Dtype | None, ...]]:
    """A layer with its modules' high bits as parameters of its own."""
    parameters, all_casts = list(layer.parameters), list(casts)
    owners = {id(p.module): n for n, p in enumerate(parameters)}
    numbers = [list(piece.parameters) for piece in pieces]
    for path, module in named_modules(layer.module):
        if not isinstance(module, NestedLinear) or module.coarse is None or id(module) not in owners:
            continue
        mine = next((own for own in numbers if owners[id(module)] in own), None)
        for key in KEYS:
            if mine is not None:
                mine.append(len(parameters))
            parameters.append(Parameter(f"{path}.{key}", module.coarse, key))
            # As the draft has them in memory.
            dtype, stored = module.coarse[key].dtype, DTYPES[where[f"{layer.path}.{path}.{key}"].dtype]
            all_casts.append(None if dtype == stored else dtype)
    whole = Layer(layer.path, layer.module, tuple(parameters))
    return whole, tuple(replace(p, parameters=tuple(n)) for p, n in zip(pieces, numbers, strict=True)), tuple(all_casts)


def _decoders(layer: Layer, before: Sequence[Decoder | None]) -> tuple[Decoder | None, ...]:
    """What codes of nested modules are put together from is all in the slot: each call does it. Others are decoded as
    before."""
    kept = (None if isinstance(d, NestedLinear) else d for d in before)
    return (*kept, *(None,) * (len(layer.parameters) - len(before)))


def _size(profile: ModelProfile, i: int, size: LayerSize) -> LayerSize:
    layer = profile.layers[i]
    whole = _piece(profile, i, range(len(layer.parameters)))
    begins = profile.place.begins(layer)
    pieces = tuple(
        replace(_piece(profile, i, piece.parameters, begins), out=before.out, block=before.block)
        for piece, before in zip(profile.pieces[i], size.pieces, strict=True)
    )
    size = replace(size, resident=whole.resident, slot=whole.slot, read=whole.read, cast=whole.cast, pieces=pieces)
    return on_cuda_size(size, profile.copies) if on_cuda() else size


def _piece(
    profile: ModelProfile, i: int, numbers: Sequence[int], begins: Mapping[Path, int] | None = None
) -> PieceSize:
    """By what is on disk: of what is streamed there is nothing in memory."""
    part = part_of(profile.layers[i], numbers)
    unit = profile.place.unit(part)
    resident = cast = 0
    for n, parameter in zip(numbers, part.parameters, strict=True):
        info, to = profile.place.where[f"{part.path}.{parameter.path}"], profile.casts[i][n]
        elements = 1
        for side in info.shape:
            elements *= side
        nbytes = elements * (ITEM_BYTES[info.dtype] if to is None else to.size)
        resident += nbytes
        cast += nbytes if to is not None else 0
        cast += UNDER_WAY * elements * ITEM_BYTES[info.dtype] if info.stored is not None else 0
    at = ranges(unit, begins) if begins is not None else ()
    return PieceSize(resident, unit.slot_bytes, unit.read_bytes, cast, at)
