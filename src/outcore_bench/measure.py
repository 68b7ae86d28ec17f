"""Measures one row in this process: loads the model, warms up, and times the repeats."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.utils
from mlx_lm.generate import BatchGenerator, generation_stream, wired_limit
from mlx_lm.generate import generate_step as resident_step

from outcore.checkpoint.checkpoint import TensorInfo
from outcore.checkpoint.lazy_model import LazyModel
from outcore.checkpoint.manifest import MANIFEST, read_manifest
from outcore.checkpoint.pack import pack_overlay
from outcore.decode.generate import generate_step
from outcore.decode.loader import load_model
from outcore.decode.preparation import prepare
from outcore.disk.metrics import Metrics
from outcore.engine.session import Session
from outcore.machine.allocator import clear_cache
from outcore.machine.device import COMPUTE_DTYPES
from outcore.machine.memory import peak_rss
from outcore.modules.hooks import absent, arrays_in, put, swap, unswap
from outcore.modules.layers import Layer
from outcore.options import LoadOptions
from outcore.plan.planner import PREFILL_STEP

from .commands import AUTO, OUTCORE
from .disk import drop_page_cache
from .document import BenchRow, Reading, RowSetting, Speed, Stat, Use
from .jobs import BenchJob

# ``RowSetting.cache`` by how weights are read. ``cold``: the page cache is emptied before each token.
CACHES = {"direct": "bypassed", "cached": "cold", "none": None}


def prompt_ids(n: int, sequence: int = 0, vocabulary: int = 128) -> list[int]:
    """Returns ``n`` token ids, the same ones in each repeat, different ones for each sequence of a batch."""
    return [(5 + (7 * i + 11 * sequence) % 113) % vocabulary for i in range(n)]


def measure(job: BenchJob, clock: Callable[[], float] = time.perf_counter) -> BenchRow:
    """Measures a row. Raises OutcoreError if the job's mode cannot load the model."""
    loop = LOOPS[job.mode](job)
    try:
        cold = (loop.files or _streamed_files(loop)) if loop.io == "cached" else ()
        _repeat(job, loop, 1, cold, clock)  # warms up
        row = _row(job, loop, [_repeat(job, loop, job.run.max_tokens, cold, clock) for _ in range(job.run.repeats)])
        # Includes MLX's cache of freed memory, as in `outcore generate`.
        row.use.peak_memory_bytes = int(mx.get_peak_memory()) + int(mx.get_cache_memory())
        row.use.peak_rss_bytes = peak_rss()
        if cold and loop.session is not None:
            row.notes.append("the time leaves out reads that went on while the page cache was emptied")
        return row
    finally:
        loop.close()


@dataclass(frozen=True)
class _Repeat:
    """Times and counters of one repeat. ``steps``: the tokens of each step; the first step includes the prompt."""

    ttft_s: float
    decode_s: float
    steps: list[list[int]]
    sweeps: int
    bytes_read: int
    read_s: float
    stall_s: float

    @property
    def decoded(self) -> int:
        return sum(len(tokens) for tokens in self.steps[1:])


def _repeat(job: BenchJob, loop: Loop, tokens: int, cold: Sequence[Path], clock: Callable[[], float]) -> _Repeat:
    """Runs the loop once. Before each step, it drops the ``cold`` files from the page cache, which is not timed."""
    prompts = [prompt_ids(job.run.prompt_tokens, i, job.vocabulary) for i in range(job.batch)]
    metrics = loop.session.metrics if loop.session is not None else Metrics()
    stepping = loop.steps(prompts, tokens + 1)
    steps: list[list[int]] = []
    seconds: list[float] = []
    while sum(map(len, steps)) < job.batch * (tokens + 1):
        if cold:
            drop_page_cache(cold)
        began = clock()
        steps.append(next(stepping))
        seconds.append(clock() - began)
        if len(steps) == 1:
            metrics.reset()
    (nbytes, read_s), sweeps, stall_s = metrics.reading(), metrics.sweeps, metrics.stall_s
    stepping.close()
    mx.synchronize(generation_stream)  # mlx-lm has already begun to compute the next token
    return _Repeat(seconds[0], sum(seconds[1:]), steps, sweeps, nbytes, read_s, stall_s)


def _streamed_files(loop: Loop) -> list[Path]:
    if loop.session is None or loop.session.streaming is None:
        return []
    units = loop.session.streaming.ring.units
    return sorted({extent.file for unit in units for extent in unit.extents})


def _row(job: BenchJob, loop: Loop, runs: Sequence[_Repeat]) -> BenchRow:
    tokens = sum(r.decoded for r in runs)
    speed = Speed(
        s_per_token=Stat.of([r.decode_s / r.decoded for r in runs]),
        decode_tps=Stat.of([r.decoded / r.decode_s for r in runs]),
        prompt_tps=Stat.of([job.batch * job.run.prompt_tokens / r.ttft_s for r in runs]),
        ttft_s=Stat.of([r.ttft_s for r in runs]),
    )
    setting = RowSetting(memory=job.memory, io=loop.io, batch=job.batch)
    setting.cache = CACHES[loop.io]
    row = BenchRow(job.mode, job.label, setting=setting, speed=speed)
    row.tokens = list(itertools.chain(*(s if job.batch == 1 else s[:1] for s in runs[0].steps)))
    if any(r.steps != runs[0].steps for r in runs):
        row.notes.append("repeats gave different tokens")
    if loop.session is not None:
        _add_session(row, job, loop.session)
        if loop.session.streaming is not None:
            _add_reading(row.reading, speed, tokens, runs)
    return row


def _add_session(row: BenchRow, job: BenchJob, session: Session) -> None:
    plan, setting, speed = session.plan, row.setting, row.speed
    setting.budget_bytes, setting.slots = plan.budget_bytes, plan.slots
    setting.resident_units, setting.streamed_units = len(plan.resident), len(plan.streamed)
    if plan.calibrated and job.batch == 1:
        speed.predicted_tps, speed.predicted_ttft_s = 1 / plan.token_s, plan.ttft_s
    parts = {
        "weights": plan.weight_bytes,
        "slots": plan.slots * plan.slot_bytes,
        "cache": plan.cache_bytes,
        "activations": plan.activation_bytes,
        "allocator": plan.allocator_bytes,
    }
    row.use = Use(parts, plan.peak_bytes)
    row.notes += session.notes


def _add_reading(reading: Reading, speed: Speed, tokens: int, runs: Sequence[_Repeat]) -> None:
    seconds, read_s = sum(r.decode_s for r in runs), sum(r.read_s for r in runs)
    nbytes, sweeps = sum(r.bytes_read for r in runs), sum(r.sweeps for r in runs)
    speed.tokens_per_sweep = tokens / sweeps if sweeps else None
    reading.engine_bytes_per_token = nbytes / tokens
    reading.read_gbps = nbytes / read_s / 1e9 if read_s else None
    reading.stall_share = sum(r.stall_s for r in runs) / seconds
    reading.io_share = min(1.0, read_s / seconds)


# Called with a prompt for each sequence and the number of tokens to generate for each. Yields the tokens of each step:
# in a batch one of each sequence, for a single sequence all tokens of the step.
Steps = Callable[[Sequence[Sequence[int]], int], Generator[list[int], None, None]]


@dataclass
class Loop:
    """A loaded model and its token loop. ``io``: how weights are read: ``direct``, ``cached`` or ``none``; ``files``:
    which files, if the session does not know."""

    model: Any
    steps: Steps
    io: str = "none"
    session: Session | None = None
    close: Callable[[], None] = lambda: None
    files: Sequence[Path] = ()


def mlx_lm_steps(model: Any, prefill_step: int = PREFILL_STEP, one: Callable[..., Any] = resident_step) -> Steps:
    """Returns a greedy loop without end tokens: ``one`` for one sequence, mlx-lm's ``BatchGenerator`` for several."""

    def steps(prompts: Sequence[Sequence[int]], tokens: int) -> Generator[list[int], None, None]:
        if len(prompts) == 1:
            prompt = mx.array(list(prompts[0]), dtype=mx.int32)
            with wired_limit(model, [generation_stream]):
                for token, *_ in one(prompt, model, max_tokens=tokens, prefill_step_size=prefill_step):
                    yield [int(token)]
            return
        generator = BatchGenerator(
            model,
            max_tokens=tokens,
            completion_batch_size=len(prompts),
            prefill_batch_size=len(prompts),
            prefill_step_size=max(1, prefill_step // len(prompts)),
        )
        with closing(generator):
            generator.insert([list(p) for p in prompts])
            for _ in range(tokens):
                yield [int(r.token) for r in sorted(generator.next_generated(), key=lambda r: r.uid)]

    return steps


def _open_mlx_lm(job: BenchJob) -> Loop:
    run = job.run
    model, _ = mlx_lm.utils.load_model(
        Path(job.folder), model_config=run.model_config, trust_remote_code=run.trust_remote_code
    )
    if run.dtype is not None:
        model.set_dtype(COMPUTE_DTYPES[run.dtype])
        mx.eval(model.parameters())
    return Loop(model, mlx_lm_steps(model, run.prefill_step_size or PREFILL_STEP))


def _open_plain(job: BenchJob) -> Loop:
    run = job.run
    dtype = COMPUTE_DTYPES[run.dtype] if run.dtype is not None else None
    options = {"model_config": run.model_config, "trust_remote_code": run.trust_remote_code}
    plain = NaiveStreaming(Path(job.folder), dtype, **options)
    steps = mlx_lm_steps(plain.model, run.prefill_step_size or PREFILL_STEP)
    return Loop(plain.model, steps, "cached", None, plain.close, plain.files)


def _open_outcore(job: BenchJob) -> Loop:
    run = job.run
    options = LoadOptions(
        memory=None if job.memory == AUTO else job.memory,
        resident=job.resident,
        slots=run.slots,
        io=job.io,
        context=job.context,
        prompt=min(job.batch * run.prompt_tokens, job.context),
        prefill_step_size=run.prefill_step_size,
        model_config=run.model_config,
        trust_remote_code=run.trust_remote_code,
        dtype=run.dtype,
        cpu_streams=run.cpu_streams,
        draft="none",
    )
    model: Any = load_model(job.folder, options)[0]
    session: Session = model.outcore
    one = generate_step if session.streaming is not None else resident_step
    return Loop(model, mlx_lm_steps(model, session.plan.prefill_step, one), session.io, session, session.close)


# By mode, the function that loads a job's model. It raises OutcoreError if it cannot load this model.
LOOPS: dict[str, Callable[[BenchJob], Loop]] = {"mlx-lm": _open_mlx_lm, "plain": _open_plain, OUTCORE: _open_outcore}


class NaiveStreaming:
    """Loads a layer's weights each time the layer is called; a layer that is never called as a whole is resident.

    Args:
        dtype: the dtype to compute in; None: the checkpoint's.
        options: ``model_config`` and ``trust_remote_code``, as in ``mlx_lm.load``.

    Attributes:
        model: a model for mlx-lm's functions. 1-D parameters and all weights outside of layers stay in memory.
        files: what layers are read from.

    Raises:
        OutcoreError: as ``prepare`` does.
    """

    def __init__(self, folder: Path, dtype: mx.Dtype | None = None, **options: Any) -> None:
        profile = prepare(folder, least=True, **options).profile
        lazy, where = profile.lazy, profile.place.where
        pack_overlay(lazy, profile.layers, profile.overlay)  # what mlx-lm changes on loading
        self.model = lazy.model
        if dtype is not None:
            self.model.set_dtype(dtype)
        self._layers = [layer for i, layer in enumerate(profile.layers) if i in profile.order]
        self.files = sorted({where[f"{layer.path}.{p.path}"].file for layer in self._layers for p in layer.parameters})
        for layer in self._layers:
            put(layer.parameters, absent([p.array for p in layer.parameters]))
            swap(layer.module, "Plain", _loading(layer, where, lazy))
        mx.eval(self.model.parameters())

    def close(self) -> None:
        for layer in self._layers:
            unswap(layer.module)


def _loading(layer: Layer, where: Mapping[str, TensorInfo], lazy: LazyModel) -> Callable[..., Any]:
    nothing = absent([p.array for p in layer.parameters])
    dtypes = [p.array.dtype for p in layer.parameters]
    paths = [f"{layer.path}.{p.path}" for p in layer.parameters]
    files, decoders = sorted({where[path].file for path in paths}), lazy.decoders
    codings = read_manifest(lazy.checkpoint.folder / MANIFEST).codings if decoders else {}
    names = [codings[path].name(path) if path in codings else where[path].name for path in paths]

    def call(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        shards: dict[Path, Any] = {file: mx.load(str(file)) for file in files}
        stored = [shards[where[path].file][name] for path, name in zip(paths, names, strict=True)]
        plain = (decoders[path].decode(a) if path in decoders else a for path, a in zip(paths, stored, strict=True))
        weights = [a.astype(dtype) for a, dtype in zip(plain, dtypes, strict=True)]
        del shards, stored, plain
        mx.eval(weights)
        put(layer.parameters, weights)
        try:
            out = original(*args, **kwargs)
            # Evaluates the caches (in the arguments), too: the output does not depend on a new recurrent state.
            mx.eval(arrays_in(out, args, kwargs))
        finally:
            put(layer.parameters, nothing)
        del weights
        clear_cache()
        return out

    return call
