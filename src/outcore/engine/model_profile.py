"""What a model weighs, before any of it is read: layers, caches, activations, and what cannot be streamed and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import mlx.core as mx
import mlx.nn as nn

from ..checkpoint.checkpoint import TensorInfo
from ..checkpoint.lazy_model import Decoder, LazyModel, longest_context, position_limit
from ..checkpoint.packed_store import Overlay, overlay, places
from ..disk.layout import COPY_ROWS, Unit
from ..errors import UnsupportedModelError
from ..machine.device import most_slot_bytes, on_cpu, on_cuda
from ..modules.cache_form import CacheForm, Growth
from ..modules.layers import Layer, Parameter, Projection, find_layers, find_pieces, find_tables
from ..modules.module_tree import named_parameters
from ..modules.nested_linear import NestedLinear
from ..modules.switches import Switch, find_switch
from ..modules.trace import Trace, rehearse
from ..plan.cache_size import COPIED, COPIED_ELSEWHERE
from ..plan.model_size import (
    METAL_REUSE_BYTES,
    REST_BYTES,
    REUSE_BYTES,
    UNDER_WAY_OPERATIONS,
    UNKNOWN_BYTES,
    ModelSize,
)
from ..plan.partition import LayerSize, smallest_slot
from ..plan.workload import planned_context
from ..sizes import format_size, most_unit
from .layer_sizes import (
    CUDA_OPERATION,
    CUDA_ROUNDING,
    CUDA_WORKSPACE,
    Cast,
    Place,
    activations,
    device_alignment,
    expert_size,
    graph_operations,
    head_size,
    item_bytes,
    layer_size,
    nbytes,
    on_cuda_size,
    output_width,
    part_of,
    resident_bytes,
    rest_kind,
)
from .transport import Forecast, Transport
from .vocabulary import Slice, Table, slices_of

if TYPE_CHECKING:
    from .engine import Engine


class Share(Protocol):
    """What this rank holds of a model that lies on several (``transport``)."""

    @property
    def forecast(self) -> Forecast | None:
        """What all ranks together are predicted to take."""

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Those of the whole model."""

    def install(self, engine: Engine) -> Transport:
        """Have calls of other ranks' layers go to those ranks, and let go of these layers' weights."""


@dataclass(frozen=True)
class ModelProfile:
    """A lazily opened model and what is known of it.

    Attributes:
        layers: every layer that a layer list holds. ``pieces``: of each, in the order of ``LayerSize.pieces``.
        units: each layer as it would be streamed; None for one that must stay resident.
        tables: embeddings and linear layers outside of layers that need not be in memory.
        casts: per layer, the dtype that each of its parameters is computed in, where it differs from the one on disk.
        decoders: per layer, of each of its parameters that is stored in another form than it is used in.
        place: how units are laid out.
        copies: memory is planned for copies of weights on a device with memory of its own.
        forms: what its caches look like; none where that is not known.
        kept_apart: of layers whose keys and values can lie on disk, which of the model's caches they are.
        switches: of each layer, whose experts can be read one by one.
        caches: how each of the model's caches grows.
        share: what this rank holds, where the model lies on several; None: it is all here.
        notes: lines for the user.
        drafts: low-bit copies of it as they would be (``self_draft``), by bits, of those that were looked at.
    """

    lazy: LazyModel
    layers: tuple[Layer, ...]
    pieces: tuple[tuple[Projection, ...], ...]
    units: tuple[Unit | None, ...]
    tables: tuple[Table, ...]
    casts: tuple[tuple[mx.Dtype | None, ...], ...]
    decoders: tuple[tuple[Decoder | None, ...], ...]
    cast: Cast
    order: tuple[int, ...]
    evaluates: bool
    size: ModelSize
    max_context: int | None
    notes: tuple[str, ...]
    place: Place
    overlay: Overlay
    copies: bool = False
    forms: tuple[CacheForm, ...] = ()
    switches: tuple[Switch | None, ...] = ()
    kept_apart: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    caches: tuple[Growth, ...] = ()
    share: Share | None = None
    drafts: dict[int, Any] = field(default_factory=dict, compare=False, repr=False)

    def unit_of(self, layer: int, parameters: Sequence[int]) -> Unit:
        """Some parameters of a layer as a unit."""
        return self.place.unit(part_of(self.layers[layer], parameters))

    def slices(self, table: Table, largest: int) -> list[Slice]:
        """A table that is multiplied with, in slices of at most ``largest`` bytes."""
        return slices_of(table.layer, table.places, largest, direct=self.place.direct, align=self.place.align)


def profile_of(
    lazy: LazyModel,
    *,
    context: int | None,
    prompt: int | None,
    dtype: mx.Dtype | None,
    direct: bool = True,
    together: bool = False,
) -> ModelProfile:
    """Find the layers of a lazily opened model, rehearse its forward pass, and add up what it weighs.

    Args:
        context: tokens of prompt and answer; None: as many as are usual.
        prompt: tokens of the longest prompt, if known.
        dtype: what to compute in; None: as the checkpoint says.
        direct: lay units out for direct reads.
        together: several sequences will share sweeps.

    Raises:
        UsageError, PromptError: as ``planned_context``.
    """
    model, to, longest = lazy.model, Cast(lazy.model, dtype), longest_context(lazy.config)
    context = planned_context(longest, position_limit(lazy.config), context, prompt)
    prompt = min(context, prompt or context)
    layers = _layers_on_disk(lazy)
    candidates = _worthwhile([t for t in find_tables(model, layers) if _on_disk(lazy, t)]) if layers else []
    pieces = [find_pieces(layer) for layer in layers]
    rehearsal, candidates, resident, notes = _rehearse(model, layers, candidates, pieces, to)
    pieces = [tuple(parts[n] for n in rehearsal.pieces.get(i, range(len(parts)))) for i, parts in enumerate(pieces)]
    planned = overlay(lazy)
    place = Place(places(lazy, layers, planned), direct, device_alignment())
    casts = [tuple(to.target(f"{layer.path}.{p.path}", p.array.dtype) for p in layer.parameters) for layer in layers]
    switches = [find_switch(layer, pieces[i]) if i in rehearsal.pieces else None for i, layer in enumerate(layers)]
    item = item_bytes(dict(named_parameters(model)), dtype)
    sizes = [
        layer_size(
            layer,
            pieces[i],
            casts[i],
            place,
            streamable=i not in resident,
            splittable=i in rehearsal.pieces,
            experts=expert_size(layer, switches[i], casts[i], place, rehearsal.used.get(i, 0), to),
            width=lambda part: item * output_width(lazy.config, part),
        )
        for i, layer in enumerate(layers)
    ]
    sizes, too_large = _within_slots(sizes, layers)
    resident = {i for i, size in enumerate(sizes) if not size.streamable}
    tables, order = _tables(lazy, candidates, to, rehearsal, len(layers))
    order = [i for i in order if i not in resident] or [i for i in range(len(layers)) if i not in resident]
    own = {} if rehearsal.evaluates else {i: n for i, n in rehearsal.own.items() if i not in resident}
    kept_apart = {i: n for i, n in own.items() if all(_unbounded(rehearsal.caches[k]) for k in n)}
    copies = on_cuda() and (together or min(context, prompt) >= COPY_ROWS)
    return ModelProfile(
        lazy=lazy,
        layers=tuple(layers),
        pieces=tuple(pieces),
        units=tuple(None if i in resident else place.unit(layer) for i, layer in enumerate(layers)),
        tables=tuple(tables),
        casts=tuple(casts),
        decoders=tuple(_decoders(lazy, layer, place) for layer in layers),
        cast=to,
        order=tuple(order),
        evaluates=rehearsal.evaluates,
        size=replace(
            _model_size(lazy, to, layers, sizes, tables, rehearsal, place, copies, context, prompt),
            kept_apart=tuple((i, rehearsal.growing_of(k)) for i, n in sorted(kept_apart.items()) for k in n),
        ),
        max_context=longest,
        notes=(*notes, *too_large),
        place=place,
        overlay=planned,
        copies=copies,
        forms=rehearsal.forms,
        switches=tuple(switches),
        kept_apart=kept_apart,
        caches=rehearsal.caches,
    )


def _decoders(lazy: LazyModel, layer: Layer, place: Place) -> tuple[Decoder | None, ...]:
    return tuple(_decoder(lazy, p, place.where[f"{layer.path}.{p.path}"]) for p in layer.parameters)


def _decoder(lazy: LazyModel, parameter: Parameter, where: TensorInfo) -> Decoder | None:
    if isinstance(parameter.module, NestedLinear):
        return parameter.module
    return None if where.stored is None else lazy.decoders[where.name]


def _unbounded(cache: Growth) -> bool:
    return cache.growing is not None and cache.growing[1] is None and not cache.fixed


def _layers_on_disk(lazy: LazyModel) -> list[Layer]:
    """The model's layers. Parameters that did not come from the checkpoint (an adapter's) have no place on disk to be
    streamed from."""
    layers = []
    for layer in find_layers(lazy.model):
        loaded = tuple(p for p in layer.parameters if f"{layer.path}.{p.path}" in lazy.loaded)
        if loaded:
            layers.append(Layer(layer.path, layer.module, loaded))
    return layers


def _within_slots(sizes: Sequence[LayerSize], layers: Sequence[Layer]) -> tuple[list[LayerSize], list[str]]:
    """Layers that no slot of this device can hold stay in memory; with a note."""
    most = most_unit(most_slot_bytes())
    large = [i for i, size in enumerate(sizes) if size.streamable and smallest_slot(size) > most]
    if not large:
        return list(sizes), []
    names = _list([layers[i].path for i in large])
    note = f"too large for a slot of this device ({format_size(most)} at most), so kept resident: {names}"
    return [replace(size, streamable=size.streamable and i not in large) for i, size in enumerate(sizes)], [note]


def _tables(
    lazy: LazyModel, candidates: Sequence[Layer], to: Cast, rehearsal: Trace, layers: int
) -> tuple[list[Table], list[int]]:
    """The tables that a pass uses, and the order of units in it: numbers beyond those of layers are tables'."""
    tables: list[Table] = []
    numbers: dict[int, int] = {}
    behind = max((at for at, n in enumerate(rehearsal.order) if n < layers), default=-1)
    for n, table in enumerate(candidates, start=layers):
        multiplied, looked_up = n in rehearsal.order, n in rehearsal.looked_up
        if multiplied or looked_up:
            where = tuple(lazy.origins[f"{table.path}.{p.path}"] for p in table.parameters)
            casts = tuple(to.target(f"{table.path}.{p.path}", p.array.dtype) for p in table.parameters)
            numbers[n] = layers + len(tables)
            head = multiplied and rehearsal.order.index(n) > behind
            tables.append(Table(table, where, casts, looked_up, multiplied, head))
    return tables, [numbers.get(i, i) for i in rehearsal.order]


def _model_size(
    lazy: LazyModel,
    to: Cast,
    layers: Sequence[Layer],
    sizes: Sequence[LayerSize],
    tables: Sequence[Table],
    rehearsal: Trace,
    place: Place,
    copies: bool,
    context: int,
    prompt: int,
) -> ModelSize:
    """All that the model takes on this device, for a context and a prompt of so many tokens."""
    parameters = dict(named_parameters(lazy.model))
    taken: dict[str, Any] = activations(lazy.config, layers, parameters, to.dtype, rehearsal.scores)
    rest = sum(nbytes(a, to.target(path, a.dtype)) for path, a in parameters.items()) - sum(s.resident for s in sizes)
    rest += sum(decoder.nbytes for decoder in lazy.decoders.values())
    if on_cuda():
        sizes = [on_cuda_size(s, copies) for s in sizes]
        rest = int(rest * CUDA_ROUNDING)
        taken["workspace"] = CUDA_WORKSPACE
        taken["token"] = max(taken["token"], graph_operations() * CUDA_OPERATION * taken["hidden"])
    # Rows that were looked up wait as they were read until the first unit computes with them.
    taken["hidden"] = max(taken["hidden"], rehearsal.passed_bytes, sum(t.row_bytes for t in tables if t.looked_up))
    # GPUs have kernels for recurrences; on the CPU device mlx-lm computes them token by token (gated_delta.py).
    by_token = on_cpu()
    if not by_token:
        # A GPU takes all that there is room for (H200), so it keeps its larger allowances until that is understood.
        taken["between"] += max((sum(p.out for p in s.pieces) for s in sizes), default=0)
        sizes = [replace(s, pieces=tuple(replace(p, out=0) for p in s.pieces)) for s in sizes]
    return ModelSize(
        layers=tuple(sizes),
        non_layer=rest,
        cache=rehearsal.cache_bytes(context),
        growing=rehearsal.growing,
        fixed=rehearsal.fixed_bytes,
        window=rehearsal.window_bytes,
        versions=rehearsal.versions,
        masked=rehearsal.masked,
        expanded=rehearsal.expanded,
        state=rehearsal.state_bytes * (UNDER_WAY_OPERATIONS if rehearsal.rewritten else 1) if by_token else 0,
        rest=REST_BYTES if by_token and rehearsal.known else UNKNOWN_BYTES,
        copied=COPIED if by_token else COPIED_ELSEWHERE,
        recurrences=rehearsal.recurrences if by_token else 0,
        context=context,
        prompt=prompt,
        tables=sum(resident_bytes(t) for t in tables if not t.multiplied),
        head=head_size([t for t in tables if t.multiplied], place),
        most_unit=most_unit(most_slot_bytes()),
        reuse=METAL_REUSE_BYTES if mx.metal.is_available() and not by_token else REUSE_BYTES,
        rest_kind=rest_kind(lazy.config, parameters, layers, to.dtype),
        **taken,
    )


def _on_disk(lazy: LazyModel, table: Layer) -> bool:
    """Whether all of a table lies on disk as the model uses it, row after row."""
    paths = [f"{table.path}.{p.path}" for p in table.parameters]
    rows = {p.array.shape[0] for p in table.parameters}
    return bool(paths) and len(rows) == 1 and all(path in lazy.origins for path in paths)


def _worthwhile(tables: Sequence[Layer]) -> list[Layer]:
    """The large ones: small products between layers are not worth a place in the ring."""
    largest = max((t.nbytes for t in tables), default=0)
    return [t for t in tables if t.nbytes * 8 >= largest]


def _rehearse(
    model: nn.Module,
    layers: Sequence[Layer],
    tables: list[Layer],
    pieces: Sequence[Sequence[Projection]],
    to: Cast,
) -> tuple[Trace, list[Layer], set[int], list[str]]:
    """The rehearsal, the tables that need not be in memory, the layers that must, and why."""
    if not layers:
        return _all_resident(model), [], set(), ["no layer lists were found: the whole model stays resident"]
    rehearsal = rehearse(model, layers, tables, pieces, to.target)
    if rehearsal.failure is not None and tables:
        # Something reads a table's weights by itself; layers can perhaps be streamed all the same.
        tables = []
        rehearsal = rehearse(model, layers, (), pieces, to.target)
    called = set(rehearsal.order)
    if rehearsal.failure is None:
        silent = [layers[i].path for i in range(len(layers)) if i not in called]
        notes = [f"never called, so kept resident: {_list(silent)}"] if silent else []
        return rehearsal, tables, {i for i in range(len(layers)) if i not in called}, notes
    why = f"its forward pass reaches into layers from outside ({rehearsal.failure})"
    return _all_resident(model), [], set(range(len(layers))), [f"nothing can be streamed: {why}"]


def _all_resident(model: nn.Module) -> Trace:
    """The rehearsal of a model that keeps its own weights all the while.

    Raises:
        UnsupportedModelError: not even so can its forward pass be built.
    """
    rehearsal = rehearse(model, [])
    if rehearsal.failure is not None:
        why = " ".join(rehearsal.failure.split())[:200]
        raise UnsupportedModelError(f"mlx-lm cannot run this model ({why}): its config.json is wrong, or mlx-lm is")
    return rehearsal


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more
