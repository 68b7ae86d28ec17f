"""Computes the sizes of layers and tables, and their layout in slots, before any weights are read."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import xxhash

from ..checkpoint.checkpoint import ITEM_BYTES, TensorInfo
from ..disk.layout import GPU_ALIGN, Source, Unit, place_unit
from ..machine.device import on_cpu
from ..modules.layers import STREAMED, Layer, Projection, modules, named_parameters
from ..plan.model_size import LOGITS_COPIES, UNDER_WAY
from ..plan.partition import LayerSize, PieceSize
from ..sizes import BLOCK, round_up
from .streamed_layers import SLICE_STEP, Table

# Extra bytes for matrix products (MLX gives cuBLAS 32 MiB at a time on Hopper), and memory that resident weights take
# relative to their size. Without these, peaks on an H200 exceeded the plan by 14 to 39 MB at the smallest budgets and
# by up to 2.5 % of the resident bytes.
CUDA_WORKSPACE, CUDA_ROUNDING = 64 << 20, 1.03

# Average output of an operation, as a multiple of a token's hidden state. MLX allocates a CUDA graph's memory when it
# builds the graph and frees it when all of it has run (cuda/device.cpp: 100 or 20 operations, depending on the GPU):
# prompts of 64 to 2,048 tokens of a 9B model took 2.2 to 2.8 MB a token on an H200, resident or streamed, where a
# layer's activations are 0.3. ``mx.set_memory_limit`` changed nothing about that and doubled the time.
CUDA_OPERATION = 3

# Ratio of a layer's activations to the sum of its projections' outputs: residuals, norms, rotations, float32
# copies.
HEADROOM = 1.5


class Cast:
    """Selects the parameters that ``--dtype`` changes: floating-point ones, except those that mlx-lm's convert
    keeps."""

    def __init__(self, model: nn.Module, dtype: mx.Dtype | None) -> None:
        self.dtype = dtype
        self._predicate = getattr(model, "cast_predicate", None) or (lambda _: True)

    def target(self, path: str, dtype: mx.Dtype) -> mx.Dtype | None:
        if self.dtype is None or dtype == self.dtype or not mx.issubdtype(dtype, mx.floating):
            return None
        return self.dtype if self._predicate(path) else None


@dataclass(frozen=True)
class Place:
    """How units are laid out in slots: ``where`` locates each parameter on disk, ``direct`` is for direct reads, and
    every weight's address is a multiple of ``align`` bytes."""

    where: Mapping[str, TensorInfo]
    direct: bool
    align: int

    def unit(self, layer: Layer) -> Unit:
        sources = []
        for p in layer.parameters:
            info = self.where[f"{layer.path}.{p.path}"]
            dtype, shape = info.stored or (info.dtype, info.shape)
            sources.append(Source(p.path, dtype, shape, info.file, info.offset, info.nbytes))
        return self._placed(layer.path, sources)

    def _placed(self, name: str, sources: Sequence[Source]) -> Unit:
        """Returns a unit with its fields in the order of ``sources``, which is the order of the parameters."""
        unit = place_unit(name, sources, direct=self.direct, align=self.align)
        by_path = {f.path: f for f in unit.fields}
        return replace(unit, fields=tuple(by_path[s.path] for s in sources))

    def slices(self, table: Table, largest: int) -> list[tuple[slice, Unit]]:
        """Cuts a table into slices whose rows are a multiple of ``SLICE_STEP`` and fit into ``largest`` bytes of a slot
        (at least one step). Returns the rows and the unit of each."""
        rows = table.places[0].shape[0]
        # Each parameter may begin and end anywhere in a block.
        room = largest - len(table.places) * 2 * BLOCK
        most = max(1, room // table.row_bytes // SLICE_STEP) * SLICE_STEP
        count = round_up(-(-rows // -(-rows // most)), SLICE_STEP)
        found = []
        for begin in range(0, rows, count):
            end, sources = min(rows, begin + count), []
            for p, info in zip(table.layer.parameters, table.places, strict=True):
                row, shape = info.nbytes // rows, (end - begin, *info.shape[1:])
                at = info.offset + begin * row
                sources.append(Source(p.path, info.dtype, shape, info.file, at, (end - begin) * row))
            found.append((slice(begin, end), self._placed(f"{table.layer.path} rows {begin} to {end}", sources)))
        return found

    def begins(self, layer: Layer) -> dict[Path, int] | None:
        """Returns the files that hold the layer, each with the layer's lowest offset in it; None if alignment moves
        each parameter by itself."""
        if self.align > 1:
            return None
        found: dict[Path, int] = {}
        for p in layer.parameters:
            info = self.where[f"{layer.path}.{p.path}"]
            found[info.file] = min(found.get(info.file, info.offset), info.offset)
        return found

    def nbytes(self, part: Layer, casts: Sequence[mx.Dtype | None]) -> list[int]:
        """Returns the bytes of each parameter in memory, in its dtype of ``casts`` (None: as on disk)."""
        infos = [self.where[f"{part.path}.{p.path}"] for p in part.parameters]
        sizes = [ITEM_BYTES[i.dtype] if to is None else to.size for i, to in zip(infos, casts, strict=True)]
        return [math.prod(i.shape) * size for i, size in zip(infos, sizes, strict=True)]

    def decoded_bytes(self, layer: Layer) -> int:
        """Returns the bytes that a layer's encoded parameters have once they are decoded."""
        stored = (self.where[f"{layer.path}.{p.path}"].stored is not None for p in layer.parameters)
        used = self.nbytes(layer, [None] * len(layer.parameters))
        return sum(n for n, apart in zip(used, stored, strict=True) if apart)


def device_alignment() -> int:
    """Returns the bytes that a weight's address must be a multiple of on MLX's default device.

    MLX writes checkpoints with headers of any length, so tensors start at odd offsets too. x86-64 loads from any
    address at the same rate, and MLX's CPU kernels gave equal bits there for every dtype and quantization (tests);
    copying each weight to an aligned place instead cost 0.4 s a token on a 4 GB model.
    """
    if not on_cpu():
        return GPU_ALIGN
    return 1 if platform.machine() in ("x86_64", "AMD64") else 8


def part_of(layer: Layer, parameters: Sequence[int]) -> Layer:
    return Layer(layer.path, layer.module, tuple(layer.parameters[n] for n in parameters))


def layer_size(
    layer: Layer,
    pieces: Sequence[Projection],
    casts: Sequence[mx.Dtype | None],
    place: Place,
    width: Callable[[Layer], int],
) -> LayerSize:
    """Returns the size of a layer and of its pieces; ``width`` returns the output bytes per token of a part of the
    layer."""
    whole, parts = weighed(layer, pieces, casts, place)
    found = []
    for piece, size in zip(pieces, parts, strict=True):
        part = part_of(layer, piece.parameters)
        found.append(replace(size, out=width(part), block=part.parameters[0].path.partition(".")[0]))
    return LayerSize(
        resident=whole.resident,
        slot=whole.slot,
        read=whole.read,
        cast=whole.cast,
        kind=_kind(layer.module, casts),
        pieces=tuple(found),
        joined=sum(getattr(m, "joined_bytes", 0) for m in modules(layer.module)),
        decoded=place.decoded_bytes(layer),
        to_cast=_cast_bytes(layer, casts, place),
    )


def weighed(
    layer: Layer, pieces: Sequence[Projection], casts: Sequence[mx.Dtype | None], place: Place
) -> tuple[PieceSize, list[PieceSize]]:
    """Returns the sizes of a layer and of each of its pieces. They come from the files' headers, as streamed weights
    are not in memory."""
    begins = place.begins(layer)
    each = [(part_of(layer, p.parameters), [casts[n] for n in p.parameters]) for p in pieces]
    return _piece_size(layer, casts, place), [_piece_size(part, mine, place, begins) for part, mine in each]


def _piece_size(
    part: Layer, casts: Sequence[mx.Dtype | None], place: Place, begins: Mapping[Path, int] | None = None
) -> PieceSize:
    unit = place.unit(part)
    return PieceSize(
        resident=sum(place.nbytes(part, casts)),
        slot=unit.slot_bytes,
        read=unit.read_bytes,
        cast=_cast_bytes(part, casts, place) + UNDER_WAY * place.decoded_bytes(part),
        ranges=ranges(unit, begins) if begins is not None else (),
    )


def ranges(unit: Unit, begins: Mapping[Path, int]) -> tuple[tuple[int, int, int], ...]:
    """Returns ``PieceSize.ranges`` of a piece; ``begins``: by file, the lowest offset of its layer."""
    numbers = {file: n for n, file in enumerate(begins)}
    return tuple((numbers[e.file], e.offset - begins[e.file], e.nbytes) for e in unit.extents)


def _cast_bytes(part: Layer, casts: Sequence[mx.Dtype | None], place: Place) -> int:
    return sum(n for n, to in zip(place.nbytes(part, casts), casts, strict=True) if to is not None)


def on_cuda_size(size: LayerSize, copies: bool) -> LayerSize:
    """Returns a layer's size on a CUDA device; ``copies`` adds twice its weights, as copies of two layers exist at once
    (measured)."""
    copied = 2 if copies else 0

    def rounded(nbytes: int) -> int:
        return int(nbytes * CUDA_ROUNDING)

    pieces = (replace(p, resident=rounded(p.resident), cast=p.cast + copied * p.slot) for p in size.pieces)
    return replace(size, resident=rounded(size.resident), cast=size.cast + copied * size.slot, pieces=tuple(pieces))


def resident_bytes(table: Table) -> int:
    return sum(nbytes(p.array, c) for p, c in zip(table.layer.parameters, table.casts, strict=True))


def head_size(tables: Sequence[Table], place: Place) -> LayerSize | None:
    if not tables:
        return None
    cast = max(resident_bytes(t) if any(t.casts) else 0 for t in tables)
    slot = max(unit.slot_bytes for t in tables for _, unit in place.slices(t, 0))
    read = sum(info.nbytes for t in tables for info in t.places)
    return LayerSize(resident=sum(map(resident_bytes, tables)), slot=slot, read=read, cast=cast)


def _kind(module: nn.Module, cast: Sequence[mx.Dtype | None]) -> str:
    """Returns a name that layers share if they take equally long to compute: class, and digest of shapes and dtypes."""
    shapes = [(path, a.shape, str(a.dtype)) for path, a in named_parameters(module)]
    return _named(type(module).__name__, (shapes, [str(c) for c in cast]))


def rest_kind(
    config: dict[str, Any], parameters: dict[str, mx.array], layers: Sequence[Layer], dtype: mx.Dtype | None
) -> str:
    inside = tuple(f"{layer.path}." for layer in layers)
    shapes = [(path, a.shape, str(a.dtype)) for path, a in parameters.items() if not path.startswith(inside)]
    return _named(str(config.get("model_type", "model")) + " outside of layers", (shapes, str(dtype)))


def _named(name: str, what: object) -> str:
    return f"{name} {xxhash.xxh64_hexdigest(repr(what).encode())[:12]}"


def nbytes(array: mx.array, dtype: mx.Dtype | None) -> int:
    return int(array.nbytes if dtype is None else array.size * dtype.size)


def activations(
    config: dict[str, Any],
    layers: Sequence[Layer],
    parameters: dict[str, mx.array],
    dtype: mx.Dtype | None,
    scores: int,
) -> dict[str, int]:
    """Returns fields of ``ModelSize``, bytes per token: activations, ``scores`` arrays of attention scores, logits."""
    flat, item = _flat(config), item_bytes(parameters, dtype)
    widest = max((output_width(config, layer) for layer in layers), default=0)
    hidden = _largest(flat.get("hidden_size"), 0)
    heads = _largest(flat.get("num_attention_heads"), max(1, hidden // 64))
    vocab = max((a.shape[0] for path, a in parameters.items() if a.ndim == 2 and path.endswith("weight")), default=0)
    return {
        "token": int(HEADROOM * item * (widest + 8 * hidden)),
        "hidden": item * hidden,
        "between": item * 2 * hidden,
        # 8 bytes for a mask made of positions.
        "score": heads * scores * item + 8,
        # Logits, log-probabilities and the sampler's sorted copies.
        "logits": vocab * 4 * LOGITS_COPIES,
    }


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    text = config.get("text_config")
    return {**config, **(text if isinstance(text, dict) else {})}


def item_bytes(parameters: Mapping[str, mx.array], dtype: mx.Dtype | None) -> int:
    """Returns the bytes of one number of an output: in ``dtype``, or in the floating-point dtype of most parameters."""
    floats: dict[int, int] = {}
    for a in parameters.values():
        if mx.issubdtype(a.dtype, mx.floating):
            floats[a.dtype.size] = floats.get(a.dtype.size, 0) + a.nbytes
    return dtype.size if dtype is not None else max(floats, key=lambda s: floats[s], default=2)


def output_width(config: dict[str, Any], layer: Layer) -> int:
    flat = _flat(config)
    counts = (flat.get(k) for k in ("num_experts_per_tok", "top_k", "num_experts_per_token"))
    experts = next((n for n in counts if n), 8)
    width = 0
    for p in layer.parameters:
        if p.path.endswith(("weight", "bias")) or p.array.ndim > 2 or hasattr(type(p.module), STREAMED):
            many = min(_largest(experts, 1), p.array.shape[0]) if p.array.ndim == 3 else 1
            width += p.array.shape[-2] * many
    return width


def _largest(value: Any, otherwise: int) -> int:
    """Returns a number of the config, or the largest of a list with one number per layer; ``otherwise``: default."""
    known = [n for n in (value if isinstance(value, list) else [value]) if type(n) is int and n > 0]
    return max(known, default=otherwise)


def graph_operations() -> int:
    """Returns how many operations MLX puts into one CUDA graph (get_graph_limits in cuda/device.cpp)."""
    if (given := os.environ.get("MLX_MAX_OPS_PER_BUFFER", "")).isdecimal():
        return int(given)
    return 100 if str(mx.device_info().get("architecture", "")) in ("sm_90", "sm_100", "sm_120") else 20
