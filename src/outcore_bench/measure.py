"""One row's numbers: a model loaded, warmed up and run a few times, in this process."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
from mlx_lm.generate import generation_stream

from outcore.disk.metrics import Event, Metrics
from outcore.engine.session import Session
from outcore.machine.memory import peak_rss

from .counters import Reads, process_reads
from .document import BenchRow, Reading, RowSetting, Speed, Stat, TimelineBar, Use
from .jobs import BenchJob
from .modes import LOOPS, Loop
from .page_cache import drop_page_cache, warm_page_cache, weight_files

CACHES = {"direct": "bypassed", "none": None}
"""What a way of reading means for the page cache, where it does not matter what is in it."""


def prompt_ids(n: int, sequence: int = 0, vocabulary: int = 128) -> list[int]:
    """Token ids for a prompt of ``n`` tokens, the same each time; another for each sequence of a batch."""
    return [(5 + (7 * i + 11 * sequence) % 113) % vocabulary for i in range(n)]


def measure(job: BenchJob, clock: Callable[[], float] = time.perf_counter) -> BenchRow:
    """Load the model, warm up, repeat; everything that can be said of this row without the others.

    Raises:
        OutcoreError: the model cannot be loaded that way.
    """
    files = weight_files(Path(job.folder))
    loop = LOOPS[job.mode](job)
    try:
        bench = _Repeats(job, loop, files, clock)
        for _ in range(job.run.warmup):
            bench.run(tokens=1)
        row = _row(job, loop, [bench.run(job.run.tokens) for _ in range(job.run.repeats)])
        if job.run.timeline and job.batch == 1 and loop.session is not None and loop.session.streaming is not None:
            row.timeline = timeline(loop, prompt_ids(job.run.prompt_tokens, vocabulary=job.vocabulary))
        # The freed memory that MLX keeps for reuse counts, as in `outcore generate`.
        row.use.peak_memory_bytes = int(mx.get_peak_memory()) + int(mx.get_cache_memory())
        row.use.peak_rss_bytes = peak_rss()
        if bench.cold and loop.session is not None:
            row.notes.append("what was read ahead while files were dropped from the page cache is not in the time")
        return row
    finally:
        loop.close()


@dataclass(frozen=True)
class _Repeat:
    """One repeat: seconds, and what was counted while decoding."""

    ttft_s: float
    seconds: list[float]
    steps: list[list[int]]
    sweeps: int
    bytes_read: int
    read_s: float
    stall_s: float
    reads: Reads | None

    @property
    def decode_s(self) -> float:
        return sum(self.seconds)

    @property
    def decoded(self) -> int:
        """Tokens after the first ones, of all sequences together."""
        return sum(len(tokens) for tokens in self.steps[1:])


class _Repeats:
    """Runs one loop again and again, and drops the page cache where cold has to be cold."""

    def __init__(self, job: BenchJob, loop: Loop, files: Sequence[Path], clock: Callable[[], float]) -> None:
        self.job, self.loop, self.clock = job, loop, clock
        self.metrics = loop.session.metrics if loop.session is not None else Metrics()
        self.cold = loop.io == "cached" and job.run.cache == "cold"
        self.files = streamed_files(loop) or list(files)
        if loop.io == "cached" and job.run.cache == "warm":
            warm_page_cache(self.files)

    def run(self, tokens: int) -> _Repeat:
        job = self.job
        prompts = [prompt_ids(job.run.prompt_tokens, i, job.vocabulary) for i in range(job.batch)]
        stepping = self.loop.steps(prompts, tokens + 1)
        ttft, first = self._step(stepping)
        self.metrics.reset()
        reads = process_reads()
        seconds, steps = [], [first]
        while sum(map(len, steps)) < job.batch * (tokens + 1):
            s, step = self._step(stepping)
            seconds.append(s)
            steps.append(step)
        nbytes, read_s = self.metrics.reading()
        sweeps, stall_s = self.metrics.sweeps, self.metrics.stall_s
        reads_now = process_reads()
        stepping.close()
        mx.synchronize(generation_stream)  # mlx-lm has begun the next token already
        return _Repeat(
            ttft,
            seconds,
            steps,
            sweeps,
            nbytes,
            read_s,
            stall_s,
            reads_now.since(reads) if reads is not None and reads_now is not None else None,
        )

    def _step(self, stepping: Generator[list[int], None, None]) -> tuple[float, list[int]]:
        if self.cold:
            drop_page_cache(self.files)
        began = self.clock()
        tokens = next(stepping)
        return self.clock() - began, tokens


def streamed_files(loop: Loop) -> list[Path]:
    """The files that a streamed model reads, which may be packed copies; empty where nothing is streamed."""
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
        seconds=[s for r in runs for s in r.seconds],
    )
    setting = RowSetting(memory=job.memory, io=loop.io, batch=job.batch, limit_bytes=job.limit)
    setting.cache = CACHES.get(loop.io, job.run.cache)
    row = BenchRow(job.mode, job.label, "", setting, speed)
    row.tokens = list(itertools.chain(*(s if job.batch == 1 else s[:1] for s in runs[0].steps)))
    reads = [r.reads for r in runs if r.reads is not None]
    if reads:
        row.reading.device_bytes_per_token = sum(r.device for r in reads) / tokens
        row.reading.cached_bytes_per_token = sum(r.cached for r in reads) / tokens
    if len({tuple(map(tuple, r.steps)) for r in runs}) > 1:
        row.notes.append("repeats gave different tokens")
    if loop.session is not None:
        _add_session(row, job, loop.session)
        if loop.session.streaming is not None:
            setting.threads = job.run.threads
            _add_reading(row.reading, speed, tokens, runs)
    return row


def _add_session(row: BenchRow, job: BenchJob, session: Session) -> None:
    """What Outcore planned."""
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
    """What the engine read."""
    seconds, read_s = sum(r.decode_s for r in runs), sum(r.read_s for r in runs)
    nbytes, sweeps = sum(r.bytes_read for r in runs), sum(r.sweeps for r in runs)
    speed.tokens_per_sweep = tokens / sweeps if sweeps else None
    reading.engine_bytes_per_token = nbytes / tokens
    reading.read_gbps = nbytes / read_s / 1e9 if read_s else None
    reading.stall_share = sum(r.stall_s for r in runs) / seconds
    reading.io_share = min(1.0, read_s / seconds)


def timeline(loop: Loop, prompt: Sequence[int]) -> list[TimelineBar]:
    """The reads and computations of one decode sweep, cut off at its beginning."""
    assert loop.session is not None
    metrics = loop.session.metrics
    stepping = loop.steps([prompt], 3)
    next(stepping)
    next(stepping)
    events: list[Event] = []
    metrics.timeline = events
    began = metrics.clock()
    next(stepping)
    ended = metrics.clock()
    metrics.timeline = None
    stepping.close()
    return [
        TimelineBar(e.kind, e.unit, max(0.0, e.begin - began), min(e.end, ended) - began)
        for e in sorted(events, key=lambda e: e.begin)
        if e.begin < ended
    ]
