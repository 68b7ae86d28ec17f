"""``load``: from a model's name and a budget to a model that runs within it, as mlx-lm's ``load`` to those that fit."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.utils
from mlx.utils import tree_flatten

from .checkpoint import resolve_model
from .cpu_streams import cores, split_rows
from .errors import BudgetError, UsageError
from .layers import Layer, Parameter, put
from .memory import default_budget, last_resort, memory_limits
from .metrics import Metrics
from .pack import pack_overlay
from .plan import ModelSize, Plan, StreamedPart, make_plan
from .reader import IO_MODES, THREADS, FileReader
from .ring import Ring
from .rows import RowReader
from .sizes import format_size, parse_size
from .store import open_model
from .stream import StreamedTable, StreamedUnit, Streaming
from .survey import Survey, on_cuda, part_of, survey
from .tables import Lookup

COMPUTE_DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}

Progress = Callable[[str, int, int], None]
"""Called with what is being done, bytes done, and bytes in all."""


@dataclass
class Session:
    """What stands behind a loaded model, as ``model.outcore``.

    Attributes:
        plan: what is resident, what is streamed, and where the bytes go.
        size: what the model weighs.
        metrics: live counters.
        io: how files are read: ``direct``, ``cached``, or ``none`` when everything is resident.
        streaming: the engine; None when everything is resident.
        notes: what the user should know: layers that could not be streamed, a dtype that would be faster.
        cpu_streams: MLX streams that linear layers are split over.
        max_context: tokens that the model itself was made for; None if it does not say.
    """

    plan: Plan
    size: ModelSize
    metrics: Metrics
    io: str = "none"
    streaming: Streaming | None = None
    notes: tuple[str, ...] = ()
    cpu_streams: int = 1
    max_context: int | None = None

    def close(self) -> None:
        """Free slots, threads and files. A streamed model cannot be called afterwards. Safe to call twice."""
        if self.streaming is not None:
            self.streaming.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class Preparation:
    """A model opened and planned for, of which nothing has been read: what ``outcore info`` shows."""

    survey: Survey
    plan: Plan
    cpu_streams: int
    notes: tuple[str, ...]


def load(
    path_or_hf_repo: str,
    tokenizer_config: dict[str, Any] | None = None,
    model_config: dict[str, Any] | None = None,
    adapter_path: str | None = None,
    return_config: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
    **options: Any,
) -> Any:
    """Load a model and its tokenizer so that the model runs within a memory budget.

    Args:
        path_or_hf_repo, tokenizer_config, model_config, adapter_path, return_config, revision, trust_remote_code:
            as in ``mlx_lm.load``.
        options: as in ``load_model``: memory, resident, slots, io, context, prefill_step_size, dtype, cpu_streams,
            head_resident, threads, progress.

    Returns:
        ``(model, tokenizer)``, or with ``return_config`` ``(model, tokenizer, config)``. The model works in mlx-lm's
        functions unchanged; ``model.outcore`` holds the plan, the metrics and ``close()``.

    Raises:
        BudgetError: the budget is too small (says the smallest that works) or larger than the machine.
        CheckpointError: the model folder is not whole, or mlx-lm does not know the model.
    """
    folder = resolve_model(path_or_hf_repo, revision)
    model, config = load_model(
        folder,
        model_config=model_config,
        trust_remote_code=trust_remote_code,
        adapter_path=adapter_path,
        **options,
    )
    try:
        extra = {"trust_remote_code": trust_remote_code, **(tokenizer_config or {})}
        tokenizer = mlx_lm.utils.load_tokenizer(folder, extra, eos_token_ids=config.get("eos_token_id"))
    except BaseException:
        model.outcore.close()
        raise
    return (model, tokenizer, config) if return_config else (model, tokenizer)


def load_model(
    model_path: str | Path,
    *,
    memory: int | str | None = None,
    resident: int | None = None,
    slots: int | None = None,
    io: str = "auto",
    context: int | None = None,
    prompt: int | None = None,
    prefill_step_size: int | None = None,
    dtype: str | None = None,
    cpu_streams: int | None = None,
    head_resident: bool | None = None,
    threads: int | None = None,
    model_config: dict[str, Any] | None = None,
    trust_remote_code: bool = False,
    adapter_path: str | None = None,
    progress: Progress | None = None,
) -> tuple[nn.Module, dict[str, Any]]:
    """Load a model from a local folder so that it runs within a memory budget.

    Args:
        memory: bytes, or a size such as ``"4GB"``, that weights, slots, caches, activations and MLX's own cache may
            use together. None: from what is free.
        resident: keep exactly so many layers in memory; None: as many as fit.
        slots: slots of the ring, at least 2; None: 3 where they fit.
        io: ``auto``, ``direct`` (around the page cache) or ``cached``.
        context: tokens of prompt and answer that memory is reserved for; None: 2048, or the model's own maximum.
        prompt: tokens of the longest prompt, if known: less memory is set aside for computing it.
        prefill_step_size: prompt tokens computed at a time; None: 2048 as in mlx-lm, or less where memory is short.
        dtype: ``float32``, ``bfloat16`` or ``float16`` to compute in; None: as the checkpoint says.
        cpu_streams: streams that linear layers are split over on the CPU device; None: one per core.
        head_resident: whether the head stays in memory; None: it is streamed only where nothing else would fit.
        threads: reads in flight at once; None: 4, or 8 where there are as many cores.
        progress: called with what is being done, bytes done and bytes in all.

    Returns:
        The model and its config. ``model.outcore`` is a ``Session``.

    Raises:
        BudgetError, UsageError, CheckpointError, StoreError, ReadError: see their docstrings.
    """
    if io not in IO_MODES:
        raise UsageError(f"--io {io}: choose one of {', '.join(IO_MODES)}")
    prepared = prepare(
        model_path,
        memory=memory,
        resident=resident,
        slots=slots,
        io=io,
        context=context,
        prompt=prompt,
        prefill_step_size=prefill_step_size,
        dtype=dtype,
        cpu_streams=cpu_streams,
        head_resident=head_resident,
        model_config=model_config,
        trust_remote_code=trust_remote_code,
        adapter_path=adapter_path,
    )
    if threads is not None and threads < 1:
        raise UsageError(f"--threads {threads}: at least 1")
    model = prepared.survey.lazy.model
    session = _install(prepared, io, threads, progress or (lambda *_: None))
    model.outcore = session
    return model, prepared.survey.lazy.config


def prepare(
    model_path: str | Path,
    *,
    memory: int | str | None = None,
    resident: int | None = None,
    slots: int | None = None,
    io: str = "auto",
    context: int | None = None,
    prompt: int | None = None,
    prefill_step_size: int | None = None,
    dtype: str | None = None,
    cpu_streams: int | None = None,
    head_resident: bool | None = None,
    model_config: dict[str, Any] | None = None,
    trust_remote_code: bool = False,
    adapter_path: str | None = None,
) -> Preparation:
    """Open a model and plan for it without reading any weights. Arguments and errors as in ``load_model``."""
    if dtype is not None and dtype not in COMPUTE_DTYPES:
        raise UsageError(f"--dtype {dtype}: choose one of {', '.join(COMPUTE_DTYPES)}")
    if cpu_streams is not None and cpu_streams < 1:
        raise UsageError(f"--cpu-streams {cpu_streams}: at least 1")
    budget = _budget(memory)
    lazy = open_model(
        Path(model_path),
        model_config=model_config,
        trust_remote_code=trust_remote_code,
        adapter_path=adapter_path,
    )
    compute = COMPUTE_DTYPES[dtype] if dtype is not None else None
    found = survey(lazy, context=context, prompt=prompt, dtype=compute, direct=io != "cached")
    plan_for = partial(
        make_plan,
        found.size,
        slots=slots,
        resident=resident,
        prefill_step=prefill_step_size,
        head_resident=head_resident,
    )
    try:
        plan = plan_for(budget)
    except BudgetError as e:
        # A caution of ours is no reason to refuse what there is room for.
        if memory is not None or e.smallest is None or e.smallest > last_resort():
            raise
        plan = plan_for(e.smallest)
    streams = (cpu_streams or cores()) if _on_cpu() else 1
    return Preparation(found, plan, streams, found.notes + _advice(found, compute))


def _on_cpu() -> bool:
    return bool(mx.default_device().type == mx.DeviceType.cpu)


def _budget(memory: int | str | None) -> int:
    if memory is None:
        return default_budget()
    budget = parse_size(memory) if isinstance(memory, str) else memory
    if budget <= 0:
        raise UsageError(f"memory={budget}: a budget must be positive")
    limit = min(memory_limits(), key=lambda limit: limit.total)
    if budget > limit.total:
        raise BudgetError(
            f"a budget of {format_size(budget)} is larger than what there is: {format_size(limit.total)} "
            f"({limit.source}); leave --memory out to use what is free"
        )
    return budget


def _advice(found: Survey, compute: mx.Dtype | None) -> tuple[str, ...]:
    parameters = dict(tree_flatten(found.lazy.model.parameters()))
    half = {a.dtype for path, a in parameters.items() if path.endswith("scales")} & {mx.bfloat16, mx.float16}
    if _on_cpu() and half and compute is None:
        # Measured with MLX 0.32.4: 8192 x 2048 at 4 bit, 11 against 98 ms.
        return ("quantized products run about 9 times faster on the CPU with --dtype float32",)
    return ()


def _install(prepared: Preparation, io: str, threads: int | None, progress: Progress) -> Session:
    found, plan = prepared.survey, prepared.plan
    model = found.lazy.model
    session = Session(
        plan,
        found.size,
        Metrics(),
        notes=prepared.notes,
        cpu_streams=prepared.cpu_streams,
        max_context=found.max_context,
    )
    mx.clear_cache()
    mx.reset_peak_memory()
    # With everything resident, mlx-lm as it is: what the budget leaves over is its cache's.
    left = 0 if plan.streams else plan.budget_bytes - plan.peak_bytes
    mx.set_cache_limit(plan.allocator_bytes + left)
    if plan.streams:
        pack_overlay(found.lazy, found.layers, progress)
    if _on_cpu():
        split_rows(model, prepared.cpu_streams)
    if not plan.streams:
        _make_resident(found, (), (), progress)
        return session
    # MLX allocates for queued work ahead of its turn; near this limit it waits for work to finish instead.
    mx.set_memory_limit(plan.budget_bytes)
    units, order = _ring_units(found, plan)
    files = sorted({extent.file for u in units for extent in u.unit.extents})
    reader = FileReader(files, io=io, threads=threads or THREADS, metrics=session.metrics)
    tables: list[StreamedTable] = []
    try:
        ring = Ring(
            [u.unit for u in units],
            reader,
            slots=plan.slots,
            order=order,
            metrics=session.metrics,
            device="cpu" if _on_cpu() else "gpu",
        )
        tables = _streamed_tables(found, plan, units, session.metrics)
        session.streaming = Streaming(
            model,
            units,
            ring,
            tables=tables,
            metrics=session.metrics,
            copies=on_cuda(),
            evaluates=found.evaluates,
        )
        session.io = "direct" if reader.direct else "cached"
        _make_resident(found, [u.layer for u in units], [t.table for t in tables], progress)
        ring.start()
    except BaseException:
        _close(reader, _lookups(tables))
        raise
    # Not the session's own close: it refers to the model, which would then never be collected.
    weakref.finalize(model, _close, ring, _lookups(tables))
    return session


def _lookups(tables: Sequence[StreamedTable]) -> list[Lookup]:
    return [t.lookup for t in tables if t.lookup is not None]


def _close(reads: Ring | FileReader, lookups: Sequence[Lookup]) -> None:
    for lookup in lookups:
        lookup.close()
    reads.close()


def _ring_units(found: Survey, plan: Plan) -> tuple[list[StreamedUnit], list[int]]:
    """What the ring holds: streamed layers or their parts, then slices of a streamed head; and the order of a sweep."""
    units: list[StreamedUnit] = []
    numbers: dict[int, list[int]] = {}
    for part in plan.parts:
        numbers.setdefault(part.layer, []).append(len(units))
        units.append(_streamed_unit(found, part))
    for i in {i for i, n in numbers.items() if len(n) == 1}:
        # One part of a layer is bound for the layer's whole call, which costs less than one for each piece.
        units[numbers[i][0]] = dataclasses.replace(units[numbers[i][0]], modules=())
    if plan.head_streamed:
        for i, table in enumerate(found.tables, start=len(found.layers)):
            if table.multiplied:
                slices = found.slices(table, plan.unit_bytes)
                numbers[i] = list(range(len(units), len(units) + len(slices)))
                units += [StreamedUnit(table.layer, s.unit, table.casts, rows=slice(s.begin, s.end)) for s in slices]
    return units, [n for i in found.order for n in numbers.get(i, [])]


def _streamed_unit(found: Survey, part: StreamedPart) -> StreamedUnit:
    """A layer, or a part of it, as a unit of the ring."""
    layer, casts = found.layers[part.layer], found.casts[part.layer]
    if not part.pieces:
        unit = found.units[part.layer]
        assert unit is not None
        return StreamedUnit(layer, unit, casts)
    pieces = [found.pieces[part.layer][n] for n in part.pieces]
    numbers = [n for piece in pieces for n in piece.parameters]
    return StreamedUnit(
        part_of(layer, numbers),
        found.unit_of(part.layer, numbers),
        tuple(casts[n] for n in numbers),
        tuple(piece.module for piece in pieces),
    )


def _streamed_tables(
    found: Survey, plan: Plan, units: Sequence[StreamedUnit], metrics: Metrics
) -> list[StreamedTable]:
    """Embeddings that are read by row, and a head that is streamed; its slices are in the ring."""
    tables = []
    for table in found.tables:
        if table.multiplied and not plan.head_streamed:
            continue
        rows = tuple((n, u.rows) for n, u in enumerate(units) if u.layer is table.layer and u.rows is not None)
        lookup = Lookup(table, RowReader([p.file for p in table.places], metrics)) if table.looked_up else None
        tables.append(StreamedTable(table.layer, rows, lookup))
    return tables


def _make_resident(found: Survey, units: Sequence[Layer], tables: Sequence[Layer], progress: Progress) -> None:
    """Read what is neither in the ring nor read by row: what is not a layer first, then layer by layer."""
    model = found.lazy.model
    elsewhere = {(id(p.module), p.key) for part in (*units, *tables) for p in part.parameters}
    groups: dict[int, list[Parameter]] = {}
    owner = {(id(p.module), p.key): i for i, layer in enumerate(found.layers) for p in layer.parameters}
    for path, module in model.named_modules():
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
        targets = [found.cast.target(p.path, a.dtype) for p, a in zip(groups[i], arrays, strict=True)]
        arrays = [a if to is None else a.astype(to) for a, to in zip(arrays, targets, strict=True)]
        mx.eval(arrays)
        put(groups[i], arrays)
    progress("loading", total, total)
