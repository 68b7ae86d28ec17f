"""One rank's part of a model: its own layers, their caches, and the weights that belong to no layer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn

from outcore.engine.layer_sizes import nbytes, resident_bytes
from outcore.engine.model_profile import ModelProfile
from outcore.engine.session import Session
from outcore.engine.streamed_layers import Table
from outcore.modules.hooks import put
from outcore.modules.layers import Layer, Parameter
from outcore.plan.model_size import ModelSize
from outcore.sizes import held_bytes

from .cuts import Cuts, find_cuts
from .link_protocol import Link
from .stage import crossings
from .transport import RankTransport

if TYPE_CHECKING:
    from .forecast import RanksPlan

# How many chunks' hidden states the link holds: two that arrive, and one that is sent.
BUFFERS = 3


@dataclass(frozen=True)
class RankShare:
    """Which rank has which layers of a model, seen from one rank.

    Attributes:
        link: this rank's link. ``owners``: the rank of each layer, by the layer's number.
        layers: all layers of the model. ``heads``: tables that only logits need, which rank 0 alone uses.
        eager: whether the model evaluates arrays in its forward pass.
        filled: whether rank 0 fills its caches of other ranks' layers, too (``PipelineStage.fill``).
        read: layers whose outputs the draft on rank 0 reads (``Draft.reads``).
        forecast: the prediction for all ranks, made when the model was loaded.
    """

    link: Link
    cuts: Cuts
    owners: tuple[int, ...]
    layers: tuple[Layer, ...]
    heads: tuple[Table, ...]
    eager: bool
    filled: bool = False
    read: tuple[int, ...] = ()
    forecast: RanksPlan | None = None

    def own(self, layer: int) -> bool:
        return self.owners[layer] == self.link.rank

    @property
    def places(self) -> tuple[int, ...]:
        """The places of this rank's layers in the order of calls of the whole model."""
        at = {layer: place for place, layer in enumerate(self.cuts.order)}
        return tuple(at[i] for i in range(len(self.layers)) if self.own(i))

    @property
    def sent(self) -> tuple[int, ...]:
        """Bytes per token that each layer sends to other ranks, in the order of calls."""
        nbytes = dict.fromkeys(self.cuts.order, 0)
        for layer, n in {(layer, n) for layer, n, _ in crossings(self.cuts, self.owners, read=self.read)}:
            if (shape := self.cuts.calls[layer].leaves[n]) is not None:
                nbytes[layer] += math.prod(shape.of(1, 1)) * shape.dtype.size
        return tuple(nbytes[layer] for layer in self.cuts.order)

    def install(self, state: Session) -> RankTransport:
        transport = RankTransport(self, state)
        transport.install()
        self.forget()
        return transport

    def forget(self) -> None:
        """Empties the weights of other ranks' layers (and of the head, except on rank 0), so that none is read."""
        gone = [layer.module for i, layer in enumerate(self.layers) if not self.own(i)]
        if self.link.rank:
            gone += [t.layer.module for t in self.heads if not t.looked_up]
        for module in gone:
            parameters = list(_all_parameters(module))
            put(parameters, [mx.zeros((0,), dtype=p.array.dtype) for p in parameters])


def cuts_of(profile: ModelProfile) -> Cuts:
    tables = [t.layer for t in profile.tables]
    return find_cuts(profile.lazy.model, profile.layers, tables, profile.cast.target, evaluates=profile.trace.evaluates)


def share_out(
    profile: ModelProfile,
    cuts: Cuts,
    link: Link,
    owners: Sequence[int],
    *,
    filled: bool = False,
    read: Sequence[int] = (),
) -> ModelProfile:
    """Returns this rank's profile of a model. ``owners``: the rank of each layer in the order of calls."""
    by_layer = dict(zip(cuts.order, owners, strict=True))
    heads = tuple(t for t in profile.tables if t.multiplied and t.head)
    ranks = tuple(by_layer[i] for i in range(len(profile.layers)))
    share = RankShare(link, cuts, ranks, profile.layers, heads, profile.trace.evaluates, filled, tuple(read))
    own = [i for i in range(len(profile.layers)) if share.own(i)]
    tables = profile.tables
    if link.rank:  # only rank 0 multiplies by heads
        kept = (t for t in tables if t.looked_up or not t.head)
        tables = tuple(replace(t, multiplied=False, head=False) if t.head else t for t in kept)
    numbers = dict(zip(own, count(), strict=False))
    old = {id(t.layer.module): len(profile.layers) + n for n, t in enumerate(profile.tables)}
    numbers |= {old[id(t.layer.module)]: len(own) + n for n, t in enumerate(tables) if t.multiplied}

    def mine(values: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(values[i] for i in own)

    return replace(
        profile,
        layers=mine(profile.layers),
        parts=mine(profile.parts),
        tables=tables,
        order=tuple(numbers[i] for i in profile.order if i in numbers),
        size=_size(profile, share, own, tables),
        trace=replace(profile.trace, forms=()),
        kept_apart={},
        share=share,
    )


def _size(profile: ModelProfile, share: RankShare, own: Sequence[int], tables: Sequence[Table]) -> ModelSize:
    size = profile.size
    mine = set(own)
    all_of_them = share.filled and share.link.rank == 0
    caches = [c for n, c in enumerate(profile.trace.caches) if all_of_them or share.cuts.users.get(n, mine) & mine]
    growing = tuple(c.growing for c in caches if c.growing is not None)
    states = sum(c.fixed for c in caches)
    left = sum(_outside_bytes(profile, share.layers[i]) for i in range(len(share.layers)) if i not in mine)
    if share.link.rank:
        left += sum(resident_bytes(t) for t in share.heads if not t.looked_up)
    # What a draft reads: rank 0 receives that of other ranks' layers, and they send it.
    read = sum(share.own(i) == bool(share.link.rank) for i in share.read)
    return replace(
        size,
        layers=tuple(size.layers[i] for i in own),
        non_layer=size.non_layer - left,
        hidden=(1 + BUFFERS + read) * size.hidden,
        cache=states + held_bytes(growing, size.context),
        growing=growing,
        fixed=max((c.fixed for c in caches if c.growing is None), default=0),
        window=sum(c.window for c in caches),
        recurrences=sum(bool(c.fixed) and c.growing is None for c in caches) if size.recurrences else 0,
        tables=sum(resident_bytes(t) for t in tables if not t.multiplied),
        head=size.head if share.link.rank == 0 else None,
        kept=states if size.kept else 0,
        kept_apart=(),
        kv_disk="off",
    )


def _outside_bytes(profile: ModelProfile, layer: Layer) -> int:
    """Returns the bytes of a layer's parameters that are not streamed, such as vectors."""
    streamed = {(id(p.module), p.key) for p in layer.parameters}
    found = [p for p in _all_parameters(layer.module) if (id(p.module), p.key) not in streamed]
    return sum(nbytes(p.array, profile.cast.target(f"{layer.path}.{p.path}", p.array.dtype)) for p in found)


def _all_parameters(module: nn.Module) -> list[Parameter]:
    found: Mapping[tuple[int, str], Parameter] = {
        (id(m), key): Parameter(f"{path}.{key}" if path else key, m, key)
        for path, m in module.named_modules()
        for key, value in m.items()
        if isinstance(value, mx.array)
    }
    return list(found.values())
