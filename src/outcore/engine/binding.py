"""Carries out a plan: reads resident weights into memory and prepares the others to be streamed or read by row."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..disk.metrics import Metrics
from ..disk.reader import CHUNK, THREADS, FileReader, Reader, RowReader
from ..machine.allocator import clear_cache, limits
from ..modules.hooks import put, settle, swap, unswap
from ..modules.layers import Layer, Parameter, named_modules, named_parameters
from ..plan.partition import StreamedPart, cut_layer
from ..plan.plan import Plan
from .layer_sizes import part_of
from .model_profile import ModelProfile
from .streamed_layers import StreamedTable, StreamedUnit

Progress = Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True)
class ReadSettings:
    """How weight files are read: ``io``, ``threads`` and ``chunk`` as in ``FileReader`` (None: its defaults)."""

    io: str = "auto"
    threads: int | None = None
    chunk: int | None = None
    progress: Progress = lambda *_: None

    @property
    def readable(self) -> bool:
        """Whether the files that the model was opened with can still be read; mirrors may have replaced them."""
        return True

    def reader(self, files: Sequence[Path], metrics: Metrics) -> Reader:
        return FileReader(files, metrics=metrics, **self.options)

    def rows(self, files: Sequence[Path], metrics: Metrics) -> RowReader:
        return RowReader(files, metrics)

    @property
    def options(self) -> dict[str, Any]:
        return {"io": self.io, "threads": self.threads or THREADS, "chunk": self.chunk or CHUNK}


def forget(streamed: Sequence[Layer]) -> None:
    for part in streamed:
        settle(part.parameters, False)
        put(part.parameters, [mx.zeros((0,), dtype=p.array.dtype) for p in part.parameters])
    clear_cache()


def row_readers(tables: Sequence[StreamedTable]) -> list[RowReader]:
    return [t.reader for t in tables if t.reader is not None]


def ring_units(profile: ModelProfile, plan: Plan) -> tuple[list[StreamedUnit], list[int]]:
    """Returns the ring's units (streamed layers or their parts, resident layers that fit the slots, slices of a
    streamed head) and their indices in the order in which a pass needs them."""
    units: list[StreamedUnit] = []
    numbers: dict[int, list[int]] = {}
    dormant = [
        dataclasses.replace(p, layer=i)
        for i in sheddable(profile, plan)
        for p in cut_layer(profile.size.layers[i], (), plan.unit_bytes).parts
    ]
    for part in (*plan.parts, *dormant):
        numbers.setdefault(part.layer, []).append(len(units))
        units.append(_streamed_unit(profile, part))
    for i in {i for i, n in numbers.items() if len(n) == 1}:
        # A layer with a single unit gets its weights once for its whole call: cheaper than for each of its modules.
        units[numbers[i][0]] = dataclasses.replace(units[numbers[i][0]], modules=())
    if plan.head_streamed:
        for i, table in enumerate(profile.tables, start=len(profile.layers)):
            if table.multiplied:
                slices = profile.place.slices(table, plan.shared_at if plan.pools else plan.unit_bytes)
                numbers[i] = list(range(len(units), len(units) + len(slices)))
                units += [StreamedUnit(table.layer, unit, table.casts, rows=rows) for rows, unit in slices]
    return units, [n for i in profile.order for n in numbers.get(i, [])]


def sheddable(profile: ModelProfile, plan: Plan) -> list[int]:
    """Returns the resident layers that fit the plan's slots, so that they could be streamed."""
    if plan.pools:
        return []
    return [
        i
        for i in plan.resident
        if profile.parts[i].unit is not None
        and all(p.slot <= plan.unit_bytes for p in cut_layer(profile.size.layers[i], (), plan.unit_bytes).parts)
    ]


def _streamed_unit(profile: ModelProfile, part: StreamedPart) -> StreamedUnit:
    layer, known = profile.layers[part.layer], profile.parts[part.layer]
    if not part.pieces:
        assert known.unit is not None
        return StreamedUnit(layer, known.unit, known.casts, decoders=known.decoders)
    pieces = [known.pieces[n] for n in part.pieces]
    numbers = [n for piece in pieces for n in piece.parameters]
    streamed = part_of(layer, numbers)
    return StreamedUnit(
        streamed,
        profile.place.unit(streamed),
        tuple(known.casts[n] for n in numbers),
        tuple(piece.module for piece in pieces),
        decoders=tuple(known.decoders[n] for n in numbers),
        experts=part.experts,
    )


def streamed_tables(
    profile: ModelProfile, plan: Plan, units: Sequence[StreamedUnit], reading: ReadSettings, metrics: Metrics
) -> list[StreamedTable]:
    """Returns the tables that are not in memory: embeddings, read by row, and heads, streamed in slices."""
    tables = []
    for table in profile.tables:
        if table.multiplied and not plan.head_streamed:
            continue
        rows = tuple((n, u.rows) for n, u in enumerate(units) if u.layer is table.layer and u.rows is not None)
        files = [p.file for p in table.places]
        tables.append(StreamedTable(table, rows, reading.rows(files, metrics) if table.looked_up else None))
    return tables


def make_resident(profile: ModelProfile, streamed: Sequence[Layer], progress: Progress, lazy: bool = False) -> None:
    """Reads all weights that are neither in the ring nor read by row, layer by layer. With ``lazy``, MLX reads each
    weight when it is first used."""
    model = profile.lazy.model
    elsewhere = {(id(p.module), p.key) for part in streamed for p in part.parameters}
    groups: dict[int, list[Parameter]] = {}
    owner = {(id(p.module), p.key): i for i, layer in enumerate(profile.layers) for p in layer.parameters}
    for path, module in named_modules(model):
        for key, value in module.items():
            if isinstance(value, mx.array) and (id(module), key) not in elsewhere:
                i = owner.get((id(module), key), -1)
                groups.setdefault(i, []).append(Parameter(f"{path}.{key}" if path else key, module, key))
    total = sum(p.array.nbytes for group in groups.values() for p in group)
    done = 0
    for i in sorted(groups):
        progress("loading", done, total)
        arrays = [p.array for p in groups[i]]
        done += sum(a.nbytes for a in arrays)
        targets = [profile.cast.target(p.path, a.dtype) for p, a in zip(groups[i], arrays, strict=True)]
        arrays = [a if to is None else a.astype(to) for a, to in zip(arrays, targets, strict=True)]
        # Stacked experts must be contiguous by row: ``modules.layers`` says why.
        arrays = [mx.contiguous(a) if a.ndim > 2 else a for a in arrays]
        if not lazy:
            # Decoding and cutting take extra memory, so evaluate one array at a time.
            for each in [[a] for a in arrays] if profile.lazy.decoders or profile.lazy.reshape else [arrays]:
                mx.eval(each)
        put(groups[i], arrays)
    progress("loading", total, total)


def check_when_read(profile: ModelProfile) -> None:
    """Makes the model's first call read the weights that are still unread, and check that the files have not
    changed."""
    model = profile.lazy.model
    unread = [weakref.ref(a) for _, a in named_parameters(model)]

    def read(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        # Check before MLX reads as well: after a failed read MLX may wait for memory forever (``allocator.mistrust``).
        profile.lazy.checkpoint.check()
        # Read the original arrays that still exist: the model's parameters may have been replaced or transformed.
        try:
            mx.eval([a for a in (weak() for weak in unread) if a is not None])
        except RuntimeError:
            limits.mistrust()
            raise
        finally:
            profile.lazy.checkpoint.check()
        unswap(model)
        return original(*args, **kwargs)

    swap(model, "Unread", read)
