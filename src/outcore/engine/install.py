"""From a plan to a model that runs by it: what stays in memory is read, the rest is bound to slots of a ring."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..checkpoint.lazy_model import position_limit
from ..checkpoint.nested import unsettle
from ..checkpoint.pack import pack_overlay
from ..disk.metrics import Metrics
from ..disk.mirrored_reader import MirroredReader
from ..disk.reader import THREADS, FileReader
from ..disk.replica import Replicas
from ..disk.ring import Ring
from ..disk.row_reader import RowReader
from ..disk.scratch import Scratch
from ..errors import StoreError
from ..machine.allocator import Needs, clear_cache, limits
from ..machine.cache_folder import make_cache
from ..machine.device import device_kind, on_cpu
from ..machine.memory import memory_limits
from ..modules.hooks import put, swap, unswap
from ..modules.layers import Layer, Parameter
from ..modules.module_tree import modules, named_modules, named_parameters
from ..modules.split_linear import split_rows
from ..modules.switches import block_of, is_stacked
from ..plan.machine_profile import Calibration
from ..plan.model_size import ModelSize
from ..plan.partition import StreamedPart, split_layer
from ..plan.plan import Plan
from ..sizes import format_size
from .executor import KVOffloader
from .governor import room
from .kv_disk import KvDisk, KvLayer
from .layer_sizes import part_of, stacked
from .memory_monitor import Watch
from .model_profile import ModelProfile
from .pooled_switch import SwitchUnit
from .residency import Residency
from .session import Session
from .slot_views import StreamedUnit
from .streaming import Streaming
from .vocabulary import Lookup, StreamedTable

KV_FOLDER = "kv"
"""Of the cache folder."""

LONGEST = 1 << 20
"""Tokens that a file of keys and values has room for from the start at most. It is sparse."""

Progress = Callable[[str, int, int], None]
"""Called with what is being done, bytes done, and bytes in all."""


@dataclasses.dataclass(frozen=True)
class ReadSettings:
    """How files are read: ``io`` as in ``FileReader``; None: the reader's own choice. ``kv_dir``: where keys and values
    may lie. ``replicas``: folders to read from."""

    io: str = "auto"
    threads: int | None = None
    chunk: int | None = None
    kv_dir: str | Path | None = None
    replicas: Replicas | None = None


def install(
    profile: ModelProfile,
    plan: Plan,
    calibration: Calibration,
    reading: ReadSettings,
    cpu_streams: int,
    progress: Progress,
    govern: bool = True,
    lazy: bool = False,
) -> Session:
    """Make a lazily opened model run by a plan.

    Args:
        govern: watch memory while it runs, and let resident layers go where it is short.
        lazy: what stays in memory is read when it is first needed, where nothing is streamed.

    Raises:
        StoreError, ReadError, UsageError: see their docstrings.
        CheckpointError: a file was written to since the model was opened.
    """
    model = profile.lazy.model
    session = Session(plan, profile.size, Metrics(), cpu_streams=cpu_streams, max_context=profile.max_context)
    embeddings = [m for m in modules(model) if isinstance(m, nn.Embedding | nn.QuantizedEmbedding)]
    session.vocabulary = max((m.weight.shape[0] for m in embeddings), default=None)
    session.forms, session.positions = profile.forms, position_limit(profile.lazy.config)
    session.read_from(reading.replicas)
    clear_cache()
    if on_cpu():
        split_rows(model, cpu_streams)
    if profile.share is not None:
        session.transport = profile.share.install(session)

    def stream(plan: Plan) -> None:
        unswap(model)
        try:
            _stream(session, residency.layers.profile, plan, reading, progress)
        except BaseException:
            # Its weights are neither in memory nor bound to a ring: whoever wants it next tries once more.
            session.unbound = functools.partial(again, plan)
            unswap(model)  # it may have got as far as the ring
            swap(model, "Unbound", bound_again)
            raise
        session.unbound = None
        if session.watch is not None:
            session.watch.attach()

    def bound_again(_: object, args: Any, kwargs: Any) -> Any:
        session.bind_again()
        return model(*args, **kwargs)

    def again(plan: Plan) -> None:
        stream(plan)
        session.plan = plan

    def check_disk(plan: Plan, size: ModelSize) -> None:
        if plan.kv_slot and (session.streaming is None or session.streaming.beside is None):
            _scratch(size, plan, reading).close(unread=True)

    residency = session.residency = Residency(session, profile, calibration, stream)
    residency.check_disk = check_disk
    session.hold = functools.partial(_hold, session, profile)
    if govern:
        plan = residency.layers.come_down(room(memory_limits()))
    try:
        if plan.streams:
            _stream(session, profile, plan, reading, progress)
        else:
            _hold(session, profile, plan)
            _make_resident(profile, (), (), progress, lazy)
            session.transport.whole(model)
            profile.lazy.checkpoint.check()
            if lazy:
                _check_when_read(profile)
    except BaseException:
        if session.limits is not None:
            session.limits()
        raise
    if govern and (residency.layers.sheddable or session.plan.pools):
        session.watch = Watch(session, session.residency)
    return session


def _check_when_read(profile: ModelProfile) -> None:
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


def _hold(session: Session, profile: ModelProfile, plan: Plan) -> None:
    """Take what a plan needs of MLX's allocator."""
    if session.closed:  # what it needed was given back
        return
    left_over = 0 if plan.streams else max(0, plan.budget_bytes - plan.peak_bytes)
    needs = Needs(
        # Where nothing is streamed, what the budget leaves over is the allocator's.
        cache=plan.allocator_bytes + left_over,
        # MLX allocates for queued work ahead of its turn, as much as there is room for. Behind each operation that
        # took it past this limit it waits for work to finish; freed memory is not counted there, or makes room late.
        memory=plan.budget_bytes - plan.allocator_bytes - session.size.ahead,
        waits=plan.streams,
        wired=plan.peak_bytes,
    )
    session.limits = limits.hold(profile.lazy.model, needs)


def _stream(session: Session, profile: ModelProfile, plan: Plan, reading: ReadSettings, progress: Progress) -> None:
    """Bind what the plan streams to a ring, and read into memory what is not there yet. Nothing is held on an error."""
    model = profile.lazy.model
    pack_overlay(profile.lazy, profile.layers, profile.overlay, progress)
    _hold(session, profile, plan)
    if session.streaming is not None:
        session.streaming.release()
        session.streaming.set_pools(*_pools(profile, plan))
    units, order = ring_units(profile, plan)
    resident = {id(profile.layers[i].module) for i in plan.resident}
    streamed = [n for n in order if id(units[n].layer.module) not in resident]
    files = sorted({extent.file for u in units for extent in u.unit.extents})
    chosen: dict[str, Any] = {"chunk": reading.chunk} if reading.chunk is not None else {}
    make: Any = FileReader
    if reading.replicas is not None and reading.replicas.mirrors:
        make = functools.partial(MirroredReader, reading.replicas)
    reader = make(files, io=reading.io, threads=reading.threads or THREADS, metrics=session.metrics, **chosen)
    tables: list[StreamedTable] = []
    try:
        # It was opened a while ago, or long ago, where memory got short since. From here on the reader looks itself.
        if not session.lost_folder:
            profile.lazy.checkpoint.check()
        tables = _streamed_tables(profile, plan, units, session.metrics, reading.replicas)
        # Weights that are in memory and shall not be: freed before slots are made.
        _forget([units[n].layer for n in streamed], tables)
        ring = Ring(
            [u.unit for u in units],
            reader,
            slots=plan.slots,
            order=streamed,
            metrics=session.metrics,
            device=device_kind(),
        )
        resident_now = [profile.layers[i].module for i in plan.resident]
        if session.streaming is not None:
            session.streaming.bind(units, ring, order=order, resident=resident_now, tables=tables)
        else:
            session.streaming = Streaming(
                model,
                units,
                ring,
                order=order,
                resident=resident_now,
                tables=tables,
                metrics=session.metrics,
                copies=profile.copies,
                evaluates=profile.evaluates,
                exclusive=session.exclusive,
                graph=profile.size.graph(on_cpu()),
                transport=session.transport,
            )
            session.streaming.set_pools(*_pools(profile, plan))
        _keep_apart(session, profile, plan, reading)
        session.io = "direct" if reader.direct else "cached"
        _make_resident(profile, [units[n].layer for n in streamed], [t.table for t in tables], progress)
        ring.start()
    except BaseException:
        _close(reader, *_readers(tables))
        raise
    if session.finalizer is not None:
        session.finalizer.detach()
    # Nothing that refers to the model, as the session and the tables do: it would never be collected.
    kv = session.streaming.beside
    session.finalizer = weakref.finalize(model, _close, ring, *_readers(tables), *([] if kv is None else [kv]))


def _pools(profile: ModelProfile, plan: Plan) -> tuple[list[SwitchUnit], list[int]]:
    """Switches whose experts are read one by one, and the slots of each."""
    units = []
    for i, _ in plan.pools:
        layer, switch, experts = profile.layers[i], profile.switches[i], profile.size.layers[i].experts
        assert switch is not None and experts is not None
        tensors = tuple(stacked(layer, switch, profile.casts[i], profile.place))
        parameters = tuple(layer.parameters[n] for n in switch.streamed)
        units.append(SwitchUnit(layer.path, switch, parameters, tensors, experts.used, block_of(layer, switch)))
    return units, [n for _, n in plan.pools]


def _forget(units: Sequence[Layer], tables: Sequence[StreamedTable]) -> None:
    for part in [*units, *(t.table for t in tables)]:
        unsettle(part.parameters)
        put(part.parameters, [mx.zeros((0,), dtype=p.array.dtype) for p in part.parameters])
    clear_cache()


def _readers(tables: Sequence[StreamedTable]) -> list[RowReader]:
    return [t.lookup.reader for t in tables if t.lookup is not None]


def _keep_apart(session: Session, profile: ModelProfile, plan: Plan, reading: ReadSettings) -> None:
    """Have keys and values of streamed layers lie on disk, if that is the plan.

    Raises:
        StoreError: the disk has no room for them.
    """
    streaming = session.streaming
    if not plan.kv_slot or streaming is None:
        return
    if isinstance(kv := streaming.beside, KvDisk):
        kv.resize(plan.kv_slot)
        return
    scratch = _scratch(session.size, plan, reading)
    engine = weakref.ref(streaming)

    def drain() -> None:
        if (there := engine()) is not None:
            there.drain()

    streaming.beside = KvDisk(
        [KvLayer(id(profile.layers[i].module), profile.layers[i].path, n) for i, n in profile.kept_apart.items()],
        scratch,
        slot_bytes=plan.kv_slot,
        tokens=max(plan.context, min(profile.max_context or 0, LONGEST)),
        drain=drain,
        metrics=session.metrics,
        device=device_kind(),
        threads=reading.threads or THREADS,
    )


def _scratch(size: ModelSize, plan: Plan, reading: ReadSettings) -> Scratch:
    """A file with room for the keys and values of a plan's context.

    Raises:
        StoreError: there is none.
    """
    folder = make_cache() / KV_FOLDER if reading.kv_dir is None else Path(reading.kv_dir)
    scratch = Scratch(folder, reading.io)
    need = sum(size.kv_read(i, plan.context) for i in plan.streamed)
    if need > (free := scratch.free_bytes):
        scratch.close(unread=True)
        raise StoreError(
            f"{scratch.folder}: keys and values of {plan.context} tokens take {format_size(need)}, and "
            f"{format_size(free)} may be taken there: free some, name another folder (OUTCORE_CACHE, or kv_dir), or "
            "ask for fewer tokens"
        )
    return scratch


def _close(*reads: Ring | FileReader | RowReader | KVOffloader) -> None:
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


def _streamed_tables(
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


def _make_resident(
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
