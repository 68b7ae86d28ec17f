"""What a model weighs, before any of it is read: layers, caches, activations, and what cannot be streamed and why."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import xxhash
from mlx.utils import tree_flatten

from ..disk.layout import COPY_ROWS, GPU_ALIGN, Source, Unit, most_unit, place_unit
from ..errors import UnsupportedModelError
from ..model.cache_form import CacheForm
from ..model.checkpoint import TensorInfo
from ..model.layers import Layer, Piece, find_layers, find_pieces, find_tables
from ..model.lazy_model import LazyModel, longest_context, position_limit
from ..model.packed_store import Overlay, overlay, places
from ..model.trace import Rehearsal, rehearse
from ..planning.context import planned_context
from ..planning.partition import LayerSize, PieceSize, smallest_slot
from ..planning.plan import LOGITS_COPIES, METAL_REUSE_BYTES, REUSE_BYTES, ModelSize
from ..sizes import format_size
from ..system.device import most_slot_bytes, on_cpu, on_cuda
from .vocabulary import Slice, Table, in_order, slices_of, smallest_slice

CUDA_WORKSPACE, CUDA_ROUNDING = 64 << 20, 1.03

CUDA_OPERATION = 3
"""Times a token's hidden state that an operation puts out, on average. MLX gives a CUDA graph's operations their memory
when it is made and takes it back when all of it has run (cuda/device.cpp: 100 operations, or 20, by the GPU): prompts
of 64 to 2,048 tokens of a 9B took 2.2 to 2.8 MB a token on an H200, resident or streamed, where a layer's activations
are 0.3. ``mx.set_memory_limit`` changes nothing about that and took twice the time."""
"""Bytes that products take beside their operands (MLX gives cuBLAS 32 MiB at a time on Hopper), and what resident
weights take over their own bytes. On an H200 the peak passed plans without these by 14 to 39 MB at the smallest budgets
and by up to 2.5 % of what was resident."""

HEADROOM = 1.5
"""Activations of a layer over the sum of its projections' outputs: residuals, norms, rotations, float32 copies."""


class Cast:
    """Which parameters ``--dtype`` changes: floating-point ones, but for those that mlx-lm's convert keeps."""

    def __init__(self, model: nn.Module, dtype: mx.Dtype | None) -> None:
        self.dtype = dtype
        self._predicate = getattr(model, "cast_predicate", None) or (lambda _: True)

    def target(self, path: str, dtype: mx.Dtype) -> mx.Dtype | None:
        """The dtype to compute ``path`` in, or None if it stays as it is."""
        if self.dtype is None or dtype == self.dtype or not mx.issubdtype(dtype, mx.floating):
            return None
        return self.dtype if self._predicate(path) else None


@dataclass(frozen=True)
class Survey:
    """A lazily opened model and what is known of it.

    Attributes:
        layers: every layer that a layer list holds. ``pieces``: of each, in the order of ``LayerSize.pieces``.
        units: each layer as it would be streamed; None for one that must stay resident.
        tables: embeddings and linear layers outside of layers that need not be in memory.
        casts: per layer, the dtype that each of its parameters is computed in, where it differs from the one on disk.
        copies: memory is planned for copies of weights on a device with memory of its own.
        forms: what its caches look like; none where that is not known.
        notes: lines for the user.
    """

    lazy: LazyModel
    layers: tuple[Layer, ...]
    pieces: tuple[tuple[Piece, ...], ...]
    units: tuple[Unit | None, ...]
    tables: tuple[Table, ...]
    casts: tuple[tuple[mx.Dtype | None, ...], ...]
    cast: Cast
    order: tuple[int, ...]
    evaluates: bool
    size: ModelSize
    max_context: int | None
    notes: tuple[str, ...]
    where: Mapping[str, TensorInfo]
    overlay: Overlay
    direct: bool
    copies: bool = False
    forms: tuple[CacheForm, ...] = ()

    def unit_of(self, layer: int, parameters: Sequence[int]) -> Unit:
        """Some parameters of a layer as a unit."""
        return unit_of(part_of(self.layers[layer], parameters), self.where, self.direct, device_alignment())

    def slices(self, table: Table, largest: int) -> list[Slice]:
        """A table that is multiplied with, in slices of at most ``largest`` bytes."""
        return slices_of(table.layer, table.places, largest, direct=self.direct, align=device_alignment())


def survey(
    lazy: LazyModel,
    *,
    context: int | None,
    prompt: int | None,
    dtype: mx.Dtype | None,
    direct: bool = True,
    together: bool = False,
) -> Survey:
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
    model = lazy.model
    longest = longest_context(lazy.config)
    context = planned_context(longest, position_limit(lazy.config), context, prompt)
    # Parameters that did not come from the checkpoint (an adapter's) have no place on disk to be streamed from.
    layers = [
        Layer(
            layer.path,
            layer.module,
            tuple(p for p in layer.parameters if f"{layer.path}.{p.path}" in lazy.loaded),
        )
        for layer in find_layers(model)
    ]
    layers = [layer for layer in layers if layer.parameters]
    candidates = _worthwhile([t for t in find_tables(model, layers) if _on_disk(lazy, t)]) if layers else []
    pieces = [find_pieces(layer) for layer in layers]
    rehearsal, candidates, resident, notes = _rehearse(model, layers, candidates, pieces)
    pieces = [tuple(parts[n] for n in rehearsal.pieces.get(i, range(len(parts)))) for i, parts in enumerate(pieces)]
    where = places(lazy, layers)
    align = device_alignment()
    to = Cast(model, dtype)
    units: list[Unit | None] = []
    casts = []
    sizes = []
    for i, layer in enumerate(layers):
        cast = tuple(to.target(f"{layer.path}.{p.path}", p.array.dtype) for p in layer.parameters)
        unit = unit_of(layer, where, direct, align)
        sizes.append(
            LayerSize(
                resident=sum(_nbytes(p.array, c) for p, c in zip(layer.parameters, cast, strict=True)),
                slot=unit.slot_bytes,
                read=unit.read_bytes,
                cast=sum(_nbytes(p.array, c) for p, c in zip(layer.parameters, cast, strict=True) if c is not None),
                streamable=i not in resident,
                kind=_kind(layer.module, cast),
                pieces=tuple(_piece_size(layer, piece, cast, where, direct, align) for piece in pieces[i]),
                splittable=i in rehearsal.pieces,
            )
        )
        units.append(None if i in resident else unit)
        casts.append(cast)
    most = most_unit(most_slot_bytes())
    large = [i for i, size in enumerate(sizes) if size.streamable and smallest_slot(size) > most]
    if large:
        resident = resident | set(large)
        sizes = [replace(size, streamable=i not in resident) for i, size in enumerate(sizes)]
        units = [None if i in resident else unit for i, unit in enumerate(units)]
        names = _list([layers[i].path for i in large])
        notes = [
            *notes,
            f"too large for a slot of this device ({format_size(most)} at most), so kept resident: {names}",
        ]
    tables = []
    for n, table in enumerate(candidates, start=len(layers)):
        places_ = [lazy.origins[f"{table.path}.{p.path}"] for p in table.parameters]
        cast = tuple(to.target(f"{table.path}.{p.path}", p.array.dtype) for p in table.parameters)
        multiplied = n in rehearsal.order
        if multiplied or n in rehearsal.looked_up:
            tables.append(Table(table, tuple(places_), cast, n in rehearsal.looked_up, multiplied))
    numbers = {id(t.layer.module): i for i, t in enumerate(tables, start=len(layers))}
    renumbered = {n: numbers.get(id(t.module), -1) for n, t in enumerate(candidates, start=len(layers))}
    parameters = dict(tree_flatten(model.parameters()))
    total = sum(_nbytes(a, to.target(path, a.dtype)) for path, a in parameters.items())
    order = [renumbered.get(i, i) for i in rehearsal.order if i not in resident]
    order = order or [i for i in range(len(layers)) if i not in resident]
    activations = _activations(lazy.config, layers, parameters, dtype)
    non_layer = total - sum(s.resident for s in sizes)
    copies = on_cuda() and (together or min(context, prompt or context) >= COPY_ROWS)
    if on_cuda():
        # Copies of two layers' weights are there at once (measured).
        copied = 2 if copies else 0
        sizes = [
            replace(
                s,
                resident=int(s.resident * CUDA_ROUNDING),
                cast=s.cast + copied * s.slot,
                pieces=tuple(
                    replace(p, resident=int(p.resident * CUDA_ROUNDING), cast=p.cast + copied * p.slot)
                    for p in s.pieces
                ),
            )
            for s in sizes
        ]
        non_layer = int(non_layer * CUDA_ROUNDING)
        activations["workspace"] = CUDA_WORKSPACE
        # ``hidden`` is a layer's input and output.
        queued = _graph_operations() * CUDA_OPERATION * activations["hidden"] // 2
        activations["token"] = max(activations["token"], queued)
    # Rows that were looked up are there twice for a moment: as they were read, and as arrays.
    activations["hidden"] += 2 * sum(t.row_bytes for t in tables if t.looked_up)
    # GPUs have kernels for recurrences; on the CPU device mlx-lm computes them token by token (gated_delta.py).
    by_token = on_cpu()
    size = ModelSize(
        layers=tuple(sizes),
        non_layer=non_layer,
        cache=rehearsal.cache_bytes(context),
        growing=rehearsal.growing,
        fixed=rehearsal.fixed_bytes,
        window=rehearsal.window_bytes,
        state=rehearsal.state_bytes if by_token else 0,
        recurrences=rehearsal.recurrences if by_token else 0,
        context=context,
        prompt=min(context, prompt or context),
        tables=sum(_resident(t) for t in tables if not t.multiplied),
        head=_head([t for t in tables if t.multiplied], direct, align),
        most_unit=most,
        reuse=METAL_REUSE_BYTES if mx.metal.is_available() and not by_token else REUSE_BYTES,
        rest_kind=_rest_kind(lazy.config, parameters, layers, dtype),
        **activations,
    )
    return Survey(
        lazy=lazy,
        layers=tuple(layers),
        pieces=tuple(pieces),
        units=tuple(units),
        tables=tuple(tables),
        casts=tuple(casts),
        cast=to,
        order=tuple(order),
        evaluates=rehearsal.evaluates,
        size=size,
        max_context=longest,
        notes=tuple(notes),
        where=where,
        overlay=overlay(lazy),
        direct=direct,
        copies=copies,
        forms=rehearsal.forms,
    )


def device_alignment() -> int:
    """Bytes that a weight's address must be a multiple of on MLX's default device.

    MLX saves checkpoints with headers of any length, so tensors start at odd offsets too. x86-64 loads from any
    address at the same rate, and MLX's CPU kernels gave equal bits there for every dtype and quantization (tests);
    copying each weight to an aligned place instead cost 0.4 s a token on a 4 GB model.
    """
    if not on_cpu():
        return GPU_ALIGN
    return 1 if platform.machine() in ("x86_64", "AMD64") else 8


def _on_disk(lazy: LazyModel, table: Layer) -> bool:
    """Whether all of a table lies on disk as the model uses it, row after row."""
    paths = [f"{table.path}.{p.path}" for p in table.parameters]
    rows = {p.array.shape[0] for p in table.parameters}
    return bool(paths) and len(rows) == 1 and all(path in lazy.origins for path in paths)


def _worthwhile(tables: Sequence[Layer]) -> list[Layer]:
    """The large ones: small products between layers are not worth a place in the ring."""
    largest = max((t.nbytes for t in tables), default=0)
    return [t for t in tables if t.nbytes * 8 >= largest]


def _resident(table: Table) -> int:
    return sum(_nbytes(p.array, c) for p, c in zip(table.layer.parameters, table.casts, strict=True))


def _head(tables: Sequence[Table], direct: bool, align: int) -> LayerSize | None:
    """What is multiplied with outside of layers, as one size."""
    if not tables:
        return None
    cast = max(_resident(t) if any(t.casts) else 0 for t in tables)
    slot = max(smallest_slice(t.layer, t.places, direct=direct, align=align) for t in tables)
    read = sum(info.nbytes for t in tables for info in t.places)
    return LayerSize(resident=sum(map(_resident, tables)), slot=slot, read=read, cast=cast)


def _graph_operations() -> int:
    """Operations that MLX puts into one CUDA graph (get_graph_limits in cuda/device.cpp)."""
    if (given := os.environ.get("MLX_MAX_OPS_PER_BUFFER", "")).isdecimal():
        return int(given)
    return 100 if str(mx.device_info().get("architecture", "")) in ("sm_90", "sm_100", "sm_120") else 20


def _rehearse(
    model: nn.Module,
    layers: Sequence[Layer],
    tables: list[Layer],
    pieces: Sequence[Sequence[Piece]],
) -> tuple[Rehearsal, list[Layer], set[int], list[str]]:
    """The rehearsal, the tables that need not be in memory, the layers that must, and why."""
    if not layers:
        return _all_resident(model), [], set(), ["no layer lists were found: the whole model stays resident"]
    rehearsal = rehearse(model, layers, tables, pieces)
    if rehearsal.outside is not None and tables:
        # Something reads a table's weights by itself; layers can perhaps be streamed all the same.
        tables = []
        rehearsal = rehearse(model, layers, (), pieces)
    called = set(rehearsal.order)
    if rehearsal.outside is None:
        silent = [layers[i].path for i in range(len(layers)) if i not in called]
        notes = [f"never called, so kept resident: {_list(silent)}"] if silent else []
        return rehearsal, tables, {i for i in range(len(layers)) if i not in called}, notes
    note = f"nothing can be streamed: {rehearsal.outside}"
    return _all_resident(model), [], set(range(len(layers))), [note]


def _all_resident(model: nn.Module) -> Rehearsal:
    """The rehearsal of a model that keeps its own weights all the while.

    Raises:
        UnsupportedModelError: not even so can its forward pass be built.
    """
    rehearsal = rehearse(model, [])
    if rehearsal.failure is not None:
        why = " ".join(rehearsal.failure.split())[:200]
        raise UnsupportedModelError(f"mlx-lm cannot run this model ({why}): its config.json is wrong, or mlx-lm is")
    return rehearsal


def unit_of(layer: Layer, where: Mapping[str, TensorInfo], direct: bool, align: int) -> Unit:
    """A layer as it is streamed; given some of its parameters only, those."""
    sources = []
    for p in layer.parameters:
        info = where[f"{layer.path}.{p.path}"]
        sources.append(Source(p.path, info.dtype, info.shape, info.file, info.offset, info.nbytes))
    return in_order(place_unit(layer.path, sources, direct=direct, align=align), layer)


def part_of(layer: Layer, parameters: Sequence[int]) -> Layer:
    """The layer with some of its parameters only."""
    return Layer(layer.path, layer.module, tuple(layer.parameters[n] for n in parameters))


def _piece_size(
    layer: Layer,
    piece: Piece,
    cast: Sequence[mx.Dtype | None],
    where: Mapping[str, TensorInfo],
    direct: bool,
    align: int,
) -> PieceSize:
    part = part_of(layer, piece.parameters)
    unit = unit_of(part, where, direct, align)
    casts = [cast[n] for n in piece.parameters]
    sizes = [_nbytes(p.array, c) for p, c in zip(part.parameters, casts, strict=True)]
    return PieceSize(
        resident=sum(sizes),
        slot=unit.slot_bytes,
        read=unit.read_bytes,
        cast=sum(n for n, c in zip(sizes, casts, strict=True) if c is not None),
    )


def _kind(module: nn.Module, cast: Sequence[mx.Dtype | None]) -> str:
    """A name for all layers that take equally long: the class, and a digest of shapes and dtypes."""
    shapes = [(path, a.shape, str(a.dtype)) for path, a in tree_flatten(module.parameters())]
    return _named(type(module).__name__, (shapes, [str(c) for c in cast]))


def _rest_kind(
    config: dict[str, Any], parameters: dict[str, mx.array], layers: Sequence[Layer], dtype: mx.Dtype | None
) -> str:
    inside = tuple(f"{layer.path}." for layer in layers)
    shapes = [(path, a.shape, str(a.dtype)) for path, a in parameters.items() if not path.startswith(inside)]
    return _named(str(config.get("model_type", "model")) + " outside of layers", (shapes, str(dtype)))


def _named(name: str, what: object) -> str:
    return f"{name} {xxhash.xxh64_hexdigest(repr(what).encode())[:12]}"


def _nbytes(array: mx.array, dtype: mx.Dtype | None) -> int:
    return int(array.nbytes if dtype is None else array.size * dtype.size)


def _activations(
    config: dict[str, Any], layers: Sequence[Layer], parameters: dict[str, mx.array], dtype: mx.Dtype | None
) -> dict[str, int]:
    """Bytes per token of activations, of attention scores, and of the logits."""
    text = config.get("text_config")
    flat = {**config, **(text if isinstance(text, dict) else {})}
    floats: dict[int, int] = {}
    for a in parameters.values():
        if mx.issubdtype(a.dtype, mx.floating):
            floats[a.dtype.size] = floats.get(a.dtype.size, 0) + a.nbytes
    item = dtype.size if dtype is not None else max(floats, key=lambda s: floats[s], default=2)
    counts = (flat.get(k) for k in ("num_experts_per_tok", "top_k", "num_experts_per_token"))
    experts = next((n for n in counts if n), 8)
    widest = 0
    for layer in layers:
        width = 0
        for p in layer.parameters:
            rows = p.array.shape[-2]
            if p.path.endswith(("weight", "bias")) or p.array.ndim > 2:
                many = min(_largest(experts, 1), p.array.shape[0]) if p.array.ndim == 3 else 1
                width += rows * many
        widest = max(widest, width)
    hidden = _largest(flat.get("hidden_size"), 0)
    heads = _largest(flat.get("num_attention_heads"), max(1, hidden // 64))
    vocab = max((a.shape[0] for path, a in parameters.items() if a.ndim == 2 and path.endswith("weight")), default=0)
    return {
        "token": int(HEADROOM * item * (widest + 8 * hidden)),
        "hidden": 2 * item * hidden,
        "between": item * (widest + 2 * hidden),
        # Scores, their softmax and a mask, made of positions, at once, where attention is not one fused kernel.
        "score": heads * 2 * item + 8,
        # Logits, log-probabilities, and what a sampler sorts.
        "logits": vocab * 4 * LOGITS_COPIES,
    }


def _largest(value: Any, otherwise: int) -> int:
    """A number of a configuration, or the largest of a list with one for each layer; the other one where it is none."""
    known = [n for n in (value if isinstance(value, list) else [value]) if type(n) is int and n > 0]
    return max(known, default=otherwise)


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more
