"""What the engine asks of experts on demand (``outcore.engine.on_demand.OnDemand``)."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from outcore.engine.layer_sizes import Cast, Place, nbytes
from outcore.modules.layers import Layer, Projection

from .expert_cache import stacked
from .expert_plan import ExpertSize
from .experts import experts_for
from .pools import Pools
from .switches import Switch, find_switch, switches_in

__all__ = ["Pools", "experts", "experts_for", "switches_in"]


def experts(
    layer: Layer, pieces: Sequence[Projection], casts: Sequence[mx.Dtype | None], place: Place, used: int, to: Cast
) -> tuple[Switch | None, ExpertSize | None]:
    switch = find_switch(layer, pieces)
    if switch is None or not used:
        return switch, None
    tensors = stacked(layer, switch, casts, place)
    held = sum(t.held_bytes for t in tensors)
    read = sum(t.read_bytes for t in tensors)
    cast = any(t.dtype is not None for t in tensors)
    copied = sum(nbytes(p.array, to.target(f"{layer.path}.{p.path}", p.array.dtype)) for p in switch.held)
    size = ExpertSize(switch.experts, used, held, read, switch.pieces, len(tensors), cast, copied // switch.experts)
    return switch, size
