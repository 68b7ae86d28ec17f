"""Measures a model before its weights are read: sizes of layers, caches and activations, and what must stay
resident."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from ..checkpoint.checkpoint import TensorInfo
from ..checkpoint.lazy_model import Decoder, LazyModel
from ..disk.layout import COPY_ROWS, Unit
from ..errors import UnsupportedModelError
from ..machine.device import most_slot_bytes, on_cpu, on_cuda
from ..modules.layers import STREAMED, Layer, Projection, find_layers, find_pieces, find_tables, named_parameters
from ..modules.trace import Trace, trace_pass
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
from ..sizes import format_size, most_unit
from .layer_sizes import (
    CUDA_OPERATION,
    CUDA_ROUNDING,
    CUDA_WORKSPACE,
    Cast,
    Place,
    activations,
    device_alignment,
    graph_operations,
    head_size,
    item_bytes,
    layer_size,
    nbytes,
    on_cuda_size,
    output_width,
    resident_bytes,
    rest_kind,
)
from .seams import ExpertFinder
from .streamed_layers import Table


@dataclass(frozen=True)
class LayerParts:
    """The parts of a layer; ``LayerSize`` has their sizes, with ``pieces`` in the same order.

    Attributes:
        casts: dtype that each parameter is computed in; None: as stored.
        decoders: decoder of each parameter; None: it is stored as it is used.
        unit: the whole layer as a unit of the ring; None: the layer must stay resident.
        switch: the layer's experts; None: they cannot be read one by one.
    """

    pieces: tuple[Projection, ...]
    casts: tuple[mx.Dtype | None, ...]
    decoders: tuple[Decoder | None, ...]
    unit: Unit | None
    switch: Any = None


@dataclass(frozen=True)
class Rounding:
    """Where results depend on what shares a pass.

    Attributes:
        rows_differ: kernels may round several tokens of a pass otherwise than one (``decode.rounding``).
        exact_batch: so texts that share a reading of the weights have passes of their own.
    """

    rows_differ: bool = False
    exact_batch: bool = False


@dataclass(frozen=True)
class ModelProfile:
    """A lazily opened model with its sizes.

    Attributes:
        tables: embeddings and linear layers outside of layers that need not be in memory.
        order: the order in which a pass calls layers and tables; ``len(layers) + n`` stands for table ``n``.
        overlay: packed copies that have to be written before streaming.
        copies: calls may copy their weights into the device's own memory, and the sizes include these copies.
        kept_apart: for each layer, the indices of its caches that KV offload can store.
        share: this rank's layers of a distributed model; its ``install`` returns the ``Transport``.
    """

    lazy: LazyModel
    layers: tuple[Layer, ...]
    parts: tuple[LayerParts, ...]
    tables: tuple[Table, ...]
    cast: Cast
    order: tuple[int, ...]
    trace: Trace
    size: ModelSize
    notes: tuple[str, ...]
    place: Place
    overlay: Any
    copies: bool = False
    kept_apart: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    share: Any = None
    rounding: Rounding = Rounding()


def profile_of(
    lazy: LazyModel,
    *,
    context: int,
    prompt: int,
    dtype: mx.Dtype | None = None,
    direct: bool = True,
    together: bool = False,
    where: Mapping[str, TensorInfo] | None = None,
    overlay: Any = None,
    experts: ExpertFinder | None = None,
) -> ModelProfile:
    """Finds a model's layers, traces its forward pass and adds up its sizes.

    Args:
        context: tokens of prompt and answer.
        prompt: tokens of the longest prompt.
        direct: lay units out for direct reads.
        together: several sequences will share passes.
        where: location of each parameter on disk, now or once ``overlay`` is written; None: the published files.
        experts: finds experts that can be read one by one; None: experts are streamed with their layer.
    """
    to = Cast(lazy.model, dtype)
    place = Place(lazy.origins if where is None else where, direct, device_alignment())
    layers = _layers_on_disk(lazy, place.where)
    trace, layers, pieces, candidates, notes = _traced(lazy, layers, to, experts, place)
    item, called = item_bytes(dict(named_parameters(lazy.model)), dtype), set(trace.order)
    sizes, parts = list[LayerSize](), list[LayerParts]()
    for i, layer in enumerate(layers):
        casts = tuple(to.target(f"{layer.path}.{p.path}", p.array.dtype) for p in layer.parameters)
        split, used = i in trace.pieces, trace.used.get(i, 0)
        switch, numbers = None, None
        if experts is not None and split:
            switch, numbers = experts.experts(layer, pieces[i], casts, place, used, to)
        size = layer_size(layer, pieces[i], casts, place, width=lambda part: item * output_width(lazy.config, part))
        sizes.append(replace(size, streamable=i in called, splittable=split, experts=numbers))
        parts.append(LayerParts(pieces[i], casts, _decoders(lazy, layer, place), None, switch))
    sizes, too_large = _within_slots(sizes, layers)
    resident = {i for i, size in enumerate(sizes) if not size.streamable}
    tables, order = _tables(lazy, candidates, to, trace, len(layers), place)
    order = [i for i in order if i not in resident] or [i for i in range(len(layers)) if i not in resident]
    own = {} if trace.evaluates else {i: n for i, n in trace.own.items() if i not in resident}
    unbounded = {
        k for k, c in enumerate(trace.caches) if c.growing is not None and c.growing[1] is None and not c.fixed
    }
    kept_apart = {i: n for i, n in own.items() if unbounded.issuperset(n)}
    copies = on_cuda() and (together or min(context, prompt) >= COPY_ROWS)
    kept_bytes = tuple((i, trace.growing_of(k)) for i, n in sorted(kept_apart.items()) for k in n)
    weighed = _model_size(lazy, to, layers, sizes, tables, trace, place, copies, context, prompt)
    return ModelProfile(
        lazy=lazy,
        layers=tuple(layers),
        parts=tuple(
            p if i in resident else replace(p, unit=place.unit(layer))
            for i, (p, layer) in enumerate(zip(parts, layers, strict=True))
        ),
        tables=tuple(tables),
        cast=to,
        order=tuple(order),
        trace=trace,
        size=replace(weighed, kept_apart=kept_bytes),
        notes=(*notes, *too_large),
        place=place,
        overlay=overlay,
        copies=copies,
        kept_apart=kept_apart,
    )


def _decoders(lazy: LazyModel, layer: Layer, place: Place) -> tuple[Decoder | None, ...]:
    found: list[Decoder | None] = []
    for p in layer.parameters:
        where, module = place.where[f"{layer.path}.{p.path}"], cast(Any, p.module)
        if hasattr(type(module), STREAMED):
            found.append(module)  # decodes its own weights
        else:
            found.append(None if where.stored is None else lazy.decoders[where.name])
    return tuple(found)


def _layers_on_disk(lazy: LazyModel, loaded: Collection[str]) -> list[Layer]:
    """Returns the model's layers, without parameters that have no place on disk (an adapter's)."""
    layers = []
    for layer in find_layers(lazy.model):
        there = tuple(p for p in layer.parameters if f"{layer.path}.{p.path}" in loaded)
        if there:
            layers.append(Layer(layer.path, layer.module, there))
    return layers


def _within_slots(sizes: Sequence[LayerSize], layers: Sequence[Layer]) -> tuple[list[LayerSize], list[str]]:
    """Returns the sizes with layers that exceed this device's largest slot marked as resident, and a note on them."""
    most = most_unit(most_slot_bytes())
    large = [i for i, size in enumerate(sizes) if size.streamable and smallest_slot(size) > most]
    if not large:
        return list(sizes), []
    names = _list([layers[i].path for i in large])
    note = f"too large for a slot of this device ({format_size(most)} at most), so kept resident: {names}"
    return [replace(size, streamable=size.streamable and i not in large) for i, size in enumerate(sizes)], [note]


def _tables(
    lazy: LazyModel, candidates: Sequence[Layer], to: Cast, trace: Trace, layers: int, place: Place
) -> tuple[list[Table], list[int]]:
    """Returns the tables that a pass uses, and the order of layers and tables as in ``ModelProfile.order``."""
    tables: list[Table] = []
    numbers: dict[int, int] = {}
    behind = max((at for at, n in enumerate(trace.order) if n < layers), default=-1)
    for n, table in enumerate(candidates, start=layers):
        multiplied, looked_up = n in trace.order, n in trace.looked_up
        if multiplied or looked_up:
            where = _places(lazy, table, place)
            casts = tuple(to.target(f"{table.path}.{p.path}", p.array.dtype) for p in table.parameters)
            numbers[n] = layers + len(tables)
            head = multiplied and trace.order.index(n) > behind
            tables.append(Table(table, where, casts, looked_up, multiplied, head, trace.looked_up.get(n, 0)))
    return tables, [numbers.get(i, i) for i in trace.order]


def _model_size(
    lazy: LazyModel,
    to: Cast,
    layers: Sequence[Layer],
    sizes: Sequence[LayerSize],
    tables: Sequence[Table],
    trace: Trace,
    place: Place,
    copies: bool,
    context: int,
    prompt: int,
) -> ModelSize:
    parameters = dict(named_parameters(lazy.model))
    taken: dict[str, Any] = activations(lazy.config, layers, parameters, to.dtype, trace.passing.scores)
    rest = sum(nbytes(a, to.target(path, a.dtype)) for path, a in parameters.items()) - sum(s.resident for s in sizes)
    rest += sum(decoder.nbytes for decoder in lazy.decoders.values())
    if on_cuda():
        sizes = [on_cuda_size(s, copies) for s in sizes]
        rest = int(rest * CUDA_ROUNDING)
        taken["workspace"] = CUDA_WORKSPACE
        taken["token"] = max(taken["token"], graph_operations() * CUDA_OPERATION * taken["hidden"])
    # Rows that were looked up stay in memory until the first unit computes with them.
    taken["hidden"] = max(taken["hidden"], trace.passing.passed, sum(t.row_bytes * t.rows for t in tables))
    # GPUs have kernels for recurrences; on the CPU device mlx-lm computes them token by token (gated_delta.py).
    by_token = on_cpu()
    if not by_token:
        # On a GPU, MLX takes all memory that it may (H200), so these allowances are larger until that is understood.
        taken["between"] += max((sum(p.out for p in s.pieces) for s in sizes), default=0)
        sizes = [replace(s, pieces=tuple(replace(p, out=0) for p in s.pieces)) for s in sizes]
    return ModelSize(
        layers=tuple(sizes),
        non_layer=rest,
        cache=trace.cache_bytes(context),
        growing=trace.growing,
        fixed=max((c.fixed for c in trace.caches if c.growing is None), default=0),
        window=trace.window_bytes,
        versions=trace.passing.versions,
        masked=trace.passing.masked,
        expanded=trace.passing.expanded,
        rewritten=(trace.rewritten or trace.scanned > 0) and by_token,
        scanned=trace.scanned * UNDER_WAY_OPERATIONS if by_token else 0,
        state=trace.state_bytes * (UNDER_WAY_OPERATIONS if trace.rewritten else 1) if by_token else 0,
        rest=REST_BYTES if by_token and trace.known else UNKNOWN_BYTES,
        copied=COPIED if by_token else COPIED_ELSEWHERE,
        recurrences=trace.recurrences if by_token else 0,
        context=context,
        prompt=prompt,
        tables=sum(resident_bytes(t) for t in tables if not t.multiplied),
        row_bytes=sum(t.row_bytes * t.rows for t in tables if not t.multiplied),
        head=head_size([t for t in tables if t.multiplied], place),
        most_unit=most_unit(most_slot_bytes()),
        reuse=METAL_REUSE_BYTES if mx.metal.is_available() and not by_token else REUSE_BYTES,
        rest_kind=rest_kind(lazy.config, parameters, layers, to.dtype),
        **taken,
    )


def _places(lazy: LazyModel, table: Layer, place: Place) -> tuple[TensorInfo, ...]:
    """Returns where a table's parameters lie on disk row by row, in the form that the model uses; empty: not all do."""
    paths = [f"{table.path}.{p.path}" for p in table.parameters]
    found = [info for path in paths if (info := lazy.origins.get(path) or place.where.get(path)) and not info.stored]
    whole = len(found) == len(paths) and len({p.array.shape[0] for p in table.parameters}) == 1
    return tuple(found) if whole else ()


def _traced(
    lazy: LazyModel, layers: list[Layer], to: Cast, experts: ExpertFinder | None, place: Place
) -> tuple[Trace, list[Layer], list[tuple[Projection, ...]], list[Layer], list[str]]:
    """Traces a pass. Returns the trace, the layers without tables, each layer's pieces in call order, the tables that
    need not be in memory, and notes."""
    model, whole = lazy.model, layers
    if not layers:
        return _all_resident(model), [], [], [], ["no layer lists were found: the whole model stays resident"]
    inner = {id(p.module) for layer in layers for p in layer.parameters}
    tables = [t for t in find_tables(model, layers) if _places(lazy, t, place)]
    # Small products between layers are not worth a place in the ring.
    largest = max((t.nbytes for t in tables if id(t.module) not in inner), default=0)
    tables = [t for t in tables if t.nbytes * 8 >= largest]
    while True:
        apart = {id(t.module) for t in tables}
        matrices = [tuple(p for p in layer.parameters if id(p.module) not in apart) for layer in whole]
        layers = [replace(layer, parameters=own) for layer, own in zip(whole, matrices, strict=True) if own]
        pieces = [find_pieces(layer) for layer in layers]
        routed = {} if experts is None else {i: experts.switches_in(layer) for i, layer in enumerate(layers)}
        found = trace_pass(model, layers, tables, pieces, to.target, routed)
        _note_parts(found, {t.path: n for n, t in enumerate(tables, len(layers))})
        rows = found.looked_up.keys() - {*found.order}
        kept = [t for n, t in enumerate(tables, len(layers)) if id(t.module) not in inner or n in rows]
        if found.failure is None and len(kept) == len(tables):
            break
        if not tables:
            why = f"its forward pass reaches into layers from outside ({found.failure})"
            return _all_resident(model), layers, pieces, [], [f"nothing can be streamed: {why}"]
        # The model's code reads a table's weights directly; layers may be streamable all the same.
        outer = [t for t in tables if id(t.module) not in inner]
        tables = kept if found.failure is None else outer if len(outer) < len(tables) else []
    silent = [layer.path for i, layer in enumerate(layers) if i not in found.order]
    notes = [f"never called, so kept resident: {_list(silent)}"] if silent else []
    ordered = [tuple(parts[n] for n in found.pieces.get(i, range(len(parts)))) for i, parts in enumerate(pieces)]
    return found, layers, ordered, tables, notes


def _note_parts(trace: Trace, numbers: Mapping[str, int]) -> None:
    """Notes all parts of tables in parts (a list of embeddings), as a trace's few tokens need only some of them."""
    parts = {path.rpartition(".")[0] for path, n in numbers.items() if n in trace.looked_up}
    for path, n in numbers.items():
        if path[-1].isdigit() and path.rpartition(".")[0] in parts:
            trace.looked_up.setdefault(n, 0)


def _all_resident(model: nn.Module) -> Trace:
    """Traces a model with all weights in place. Raises UnsupportedModelError if even then its pass cannot be built."""
    trace = trace_pass(model, [])
    if trace.failure is not None:
        why = " ".join(trace.failure.split())[:200]
        raise UnsupportedModelError(f"mlx-lm cannot run this model ({why}): is its config.json right?")
    return trace


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more
