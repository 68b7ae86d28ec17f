"""What a plan binds: which weights are read into memory, which lie in units of the ring, and which are read by row."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..checkpoint.nested import unsettle
from ..disk.metrics import Metrics
from ..disk.mirrored_reader import MirroredReader, Replicas
from ..disk.reader import THREADS, FileReader
from ..disk.ring import Ring
from ..disk.row_reader import RowReader
from ..disk.scratch import Scratch
from ..errors import StoreError
from ..machine.allocator import clear_cache, limits
from ..machine.cache_folder import make_cache
from ..modules.hooks import put, swap, unswap
from ..modules.layers import Layer, Parameter
from ..modules.module_tree import named_modules, named_parameters
from ..modules.switches import block_of, is_stacked
from ..plan.model_size import ModelSize
from ..plan.partition import StreamedPart, split_layer
from ..plan.plan import Plan
from ..sizes import format_size
from .executor import KVOffloader
from .layer_sizes import part_of, stacked
from .model_profile import ModelProfile
from .pooled_switch import SwitchUnit
from .slot_views import StreamedUnit
from .vocabulary import Lookup, StreamedTable

KV_FOLDER = "kv"
"""Of the cache folder."""

Progress = Callable[[str, int, int], None]
"""Called with what is being done, bytes done, and bytes in all."""


Closable = Ring | FileReader | RowReader | KVOffloader


@dataclasses.dataclass(frozen=True)
class ReadSettings:
    """How files are read.

    Attributes:
        io: as in ``FileReader``. threads, chunk: None: the reader's own choice.
        kv_dir: where keys and values may lie; None: the cache folder.
        replicas: folders to read from; None: files are read where they were opened.
        progress: called while weights are read or packed.
    """

    io: str = "auto"
    threads: int | None = None
    chunk: int | None = None
    kv_dir: str | Path | None = None
    replicas: Replicas | None = None
    progress: Progress = lambda *_: None

    @property
    def lost_folder(self) -> bool:
        """Whether the model's own folder can be read no more, and mirrors are."""
        return self.replicas is not None and self.replicas.all[0].lost is not None

    def reader(self, units: Sequence[StreamedUnit], metrics: Metrics) -> FileReader:
        """Reads these units."""
        files = sorted({extent.file for u in units for extent in u.unit.extents})
        chosen: dict[str, Any] = {"chunk": self.chunk} if self.chunk is not None else {}
        make: Any = FileReader
        if self.replicas is not None and self.replicas.mirrors:
            make = functools.partial(MirroredReader, self.replicas)
        reader: FileReader = make(files, io=self.io, threads=self.threads or THREADS, metrics=metrics, **chosen)
        return reader


def pool_units(profile: ModelProfile, plan: Plan) -> tuple[list[SwitchUnit], list[int]]:
    """Switches whose experts are read one by one, and the slots of each."""
    units = []
    for i, _ in plan.pools:
        layer, switch, experts = profile.layers[i], profile.switches[i], profile.size.layers[i].experts
        assert switch is not None and experts is not None
        tensors = tuple(stacked(layer, switch, profile.casts[i], profile.place))
        parameters = tuple(layer.parameters[n] for n in switch.streamed)
        units.append(SwitchUnit(layer.path, switch, parameters, tensors, experts.used, block_of(layer, switch)))
    return units, [n for _, n in plan.pools]


def forget(units: Sequence[Layer], tables: Sequence[StreamedTable]) -> None:
    for part in [*units, *(t.table for t in tables)]:
        unsettle(part.parameters)
        put(part.parameters, [mx.zeros((0,), dtype=p.array.dtype) for p in part.parameters])
    clear_cache()


def row_readers(tables: Sequence[StreamedTable]) -> list[RowReader]:
    return [t.lookup.reader for t in tables if t.lookup is not None]


def scratch_for(size: ModelSize, plan: Plan, reading: ReadSettings) -> Scratch:
    """A file with room for the keys and values of a plan's context.

    Raises:
        StoreError: there is none.
    """
    folder = make_cache() / KV_FOLDER if reading.kv_dir is None else Path(reading.kv_dir)
    scratch = Scratch(folder, reading.io)
    need = sum(size.kv_read(i, plan.context) for i in plan.streamed)
    if need > (free := scratch.free_bytes):
        scratch.close()
        raise StoreError(
            f"{scratch.folder}: keys and values of {plan.context} tokens take {format_size(need)}, and "
            f"{format_size(free)} may be taken there: free some, name another folder (OUTCORE_CACHE, or kv_dir), or "
            "ask for fewer tokens"
        )
    return scratch


def close_all(*reads: Closable) -> None:
    for each in reads:
        each.close()


def ring_units(profile: ModelProfile, plan: Plan) -> tuple[list[StreamedUnit], list[int]]:
    """What the ring may hold, and the order of a sweep over all of it.

    Streamed layers or their parts; resident ones that slots have room for, so that they can be streamed later; slices
    of a streamed head.
    """
    units: list[StreamedUnit] = []
    numbers: dict[int, list[int]] = {}
    dormant = [
        dataclasses.replace(p, layer=i)
        for i in sheddable(profile, plan)
        for p in split_layer(profile.size.layers[i], (), plan.unit_bytes)
    ]
    for part in (*plan.parts, *dormant):
        numbers.setdefault(part.layer, []).append(len(units))
        units.append(_streamed_unit(profile, part))
    for i in {i for i, n in numbers.items() if len(n) == 1}:
        # One part of a layer is bound for the layer's whole call, which costs less than one for each piece.
        units[numbers[i][0]] = dataclasses.replace(units[numbers[i][0]], modules=())
    if plan.head_streamed:
        for i, table in enumerate(profile.tables, start=len(profile.layers)):
            if table.multiplied:
                slices = profile.slices(table, plan.unit_bytes)
                numbers[i] = list(range(len(units), len(units) + len(slices)))
                units += [StreamedUnit(table.layer, s.unit, table.casts, rows=slice(s.begin, s.end)) for s in slices]
    return units, [n for i in profile.order for n in numbers.get(i, [])]


def sheddable(profile: ModelProfile, plan: Plan) -> list[int]:
    """Resident layers that could be streamed through the plan's slots."""
    if plan.pools:
        return []
    return [
        i
        for i in plan.resident
        if profile.units[i] is not None
        and all(p.slot <= plan.unit_bytes for p in split_layer(profile.size.layers[i], (), plan.unit_bytes))
    ]


def _streamed_unit(profile: ModelProfile, part: StreamedPart) -> StreamedUnit:
    """A layer, or a part of it, as a unit of the ring."""
    layer, casts = profile.layers[part.layer], profile.casts[part.layer]
    if not part.pieces:
        unit = profile.units[part.layer]
        assert unit is not None
        return StreamedUnit(layer, unit, casts, decoders=profile.decoders[part.layer])
    pieces = [profile.pieces[part.layer][n] for n in part.pieces]
    numbers = [n for piece in pieces for n in piece.parameters]
    return StreamedUnit(
        part_of(layer, numbers),
        profile.unit_of(part.layer, numbers),
        tuple(casts[n] for n in numbers),
        tuple(piece.module for piece in pieces),
        decoders=tuple(profile.decoders[part.layer][n] for n in numbers),
    )


def streamed_tables(
    profile: ModelProfile, plan: Plan, units: Sequence[StreamedUnit], metrics: Metrics, replicas: Replicas | None
) -> list[StreamedTable]:
    """Embeddings that are read by row, and a head that is streamed; its slices are in the ring."""
    tables = []
    for table in profile.tables:
        if table.multiplied and not plan.head_streamed:
            continue
        rows = tuple((n, u.rows) for n, u in enumerate(units) if u.layer is table.layer and u.rows is not None)
        files = [p.file for p in table.places]
        lookup = Lookup(table, RowReader(files, metrics, replicas)) if table.looked_up else None
        tables.append(StreamedTable(table.layer, rows, lookup, table.head))
    return tables


def make_resident(
    profile: ModelProfile, units: Sequence[Layer], tables: Sequence[Layer], progress: Progress, lazy: bool = False
) -> None:
    """Read what is neither in the ring nor read by row: what is not a layer first, then layer by layer; or leave it to
    be read when it is first needed."""
    model = profile.lazy.model
    elsewhere = {(id(p.module), p.key) for part in (*units, *tables) for p in part.parameters}
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
        arrays = [mx.contiguous(a) if is_stacked(p.module) else a for p, a in zip(groups[i], arrays, strict=True)]
        if not lazy:
            # What is decoded or cut takes memory on its way: one after the other, of one at a time.
            for each in [[a] for a in arrays] if profile.lazy.decoders or profile.lazy.high else [arrays]:
                mx.eval(each)
        put(groups[i], arrays)
    progress("loading", total, total)


def check_when_read(profile: ModelProfile) -> None:
    """Have the first call read what is left to be read, and look whether the files are still what they were."""
    model = profile.lazy.model
    unread = [weakref.ref(a) for _, a in named_parameters(model)]

    def read(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        # Before MLX reads, too: what fails there may be counted as under way for ever (``allocator.mistrust``).
        profile.lazy.checkpoint.check()
        # Those that are still there, and not the model's parameters: those may be others', or a transformation's.
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
