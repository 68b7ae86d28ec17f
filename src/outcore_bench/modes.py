"""The ways of running a model that are measured side by side. A later loop adds itself with ``register``."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.utils
from mlx_lm.generate import BatchGenerator, generation_stream, wired_limit
from mlx_lm.generate import generate_step as resident_step

from outcore.decode.one_text import generate_step
from outcore.engine.session import Session
from outcore.loading.loader import load_model
from outcore.machine.device import COMPUTE_DTYPES
from outcore.options import LoadOptions
from outcore.plan.planner import PREFILL_STEP

from .plain_way import PlainWay
from .words import AUTO, WAYS

Steps = Callable[[Sequence[Sequence[int]], int], Generator[list[int], None, None]]
"""Called with a prompt for each sequence and a number of tokens for each. Yields the tokens that are handed out
together: one of each sequence in a batch; of a single sequence, as many as one step of the loop gives."""


@dataclass(frozen=True)
class BenchJob:
    """One row to be measured, as it goes to a process of its own.

    Attributes:
        folder: of the model. ``vocabulary``: its tokens; prompts are made of them.
        memory, resident, slots, io, threads, dtype, cpu_streams, context, prefill_step_size, trust_remote_code: as in
            ``load_model``. ``quantize_activations``: of mlx-lm's ``model_config``.
        delay: seconds to wait before each repeat.
        limit: bytes of the control group that it runs in.
    """

    mode: str
    folder: str
    label: str
    tokens: int
    prompt_tokens: int
    repeats: int
    warmup: int
    batch: int
    cache: str
    context: int
    vocabulary: int
    memory: str | None = None
    resident: int | None = None
    slots: int | None = None
    io: str = AUTO
    threads: int | None = None
    dtype: str | None = None
    cpu_streams: int | None = None
    timeline: bool = False
    limit: int | None = None
    delay: int = 0
    prefill_step_size: int | None = None
    quantize_activations: bool = False
    trust_remote_code: bool = False

    @property
    def model_config(self) -> dict[str, Any] | None:
        """As mlx-lm's ``load`` takes it."""
        return {"quantize_activations": True} if self.quantize_activations else None

    def command(self, name: str) -> str:
        """The command that measures this row alone."""
        argv = ["outcore", "bench", name, "--modes", self.mode]
        budgeted = MODES[self.mode].budgeted
        if budgeted:
            argv += ["--memory", self.memory or AUTO] if self.resident is None else ["--resident", str(self.resident)]
            argv += ["--io", self.io]
        for flag, value in (
            ("--cache", self.cache),
            ("--batch", self.batch),
            ("--tokens", self.tokens),
            ("--prompt-tokens", self.prompt_tokens),
            ("--repeats", self.repeats),
            ("--warmup", self.warmup),
            ("--dtype", self.dtype),
            ("--cpu-streams", self.cpu_streams if budgeted else None),
            ("--slots", self.slots if budgeted else None),
            ("--threads", self.threads if budgeted else None),
            ("--limit", f"{self.limit}B" if self.limit else None),
            ("--delay", self.delay or None),
            ("--prefill-step-size", self.prefill_step_size),
        ):
            argv += [] if value is None else [flag, str(value)]
        for flag, given in (
            ("--quantize-activations", self.quantize_activations),
            ("--trust-remote-code", self.trust_remote_code),
            ("--timeline", self.timeline),
        ):
            argv += [flag] if given else []
        return shlex.join(argv)


@dataclass
class Loop:
    """A loaded model and its token loop.

    Attributes:
        io: how weights are read while it runs: ``direct``, ``cached`` or ``none``.
        session: the engine's, where it is Outcore's.
    """

    model: Any
    steps: Steps
    io: str = "none"
    session: Session | None = None
    close: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Mode:
    """A way of running a model.

    Attributes:
        streams: reads weights while it runs, so the page cache and the disk's rate matter.
        budgeted: runs once for each budget, residency and way of reading; else once.
        open: loads the model.
    """

    name: str
    what: str
    open: Callable[[BenchJob], Loop]
    streams: bool
    budgeted: bool


MODES: dict[str, Mode] = {}


def register(mode: Mode) -> None:
    """Add a mode; it is measured wherever ``--modes`` does not say otherwise."""
    MODES[mode.name] = mode


def mlx_lm_steps(model: Any, prefill_step: int = PREFILL_STEP) -> Steps:
    """mlx-lm's own loops: ``generate_step`` for one sequence, ``BatchGenerator`` for several. Greedy, no end token."""

    def steps(prompts: Sequence[Sequence[int]], tokens: int) -> Generator[list[int], None, None]:
        if len(prompts) == 1:
            prompt = mx.array(list(prompts[0]), dtype=mx.int32)
            with wired_limit(model, [generation_stream]):
                for token, _ in resident_step(prompt, model, max_tokens=tokens, prefill_step_size=prefill_step):
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
    model, _ = mlx_lm.utils.load_model(
        Path(job.folder), model_config=job.model_config, trust_remote_code=job.trust_remote_code
    )
    if job.dtype is not None:
        model.set_dtype(COMPUTE_DTYPES[job.dtype])
        mx.eval(model.parameters())
    return Loop(model, mlx_lm_steps(model, job.prefill_step_size or PREFILL_STEP))


def _open_plain(job: BenchJob) -> Loop:
    plain = PlainWay(
        Path(job.folder),
        COMPUTE_DTYPES[job.dtype] if job.dtype is not None else None,
        model_config=job.model_config,
        trust_remote_code=job.trust_remote_code,
    )
    steps = mlx_lm_steps(plain.model, job.prefill_step_size or PREFILL_STEP)
    return Loop(plain.model, steps, io="cached", close=plain.close)


def _open_outcore(job: BenchJob) -> Loop:
    model = _loaded(job)
    session: Session = model.outcore
    steps = mlx_lm_steps(model, session.plan.prefill_step)
    if session.streaming is not None and job.batch == 1:
        steps = _outcore_steps(model, session)
    return Loop(model, steps, session.io, session, session.close)


def _loaded(job: BenchJob) -> Any:
    options = LoadOptions(
        memory=None if job.memory == AUTO else job.memory,
        resident=job.resident,
        slots=job.slots,
        io=job.io,
        context=job.context,
        prompt=min(job.batch * job.prompt_tokens, job.context),
        prefill_step_size=job.prefill_step_size,
        model_config=job.model_config,
        trust_remote_code=job.trust_remote_code,
        dtype=job.dtype,
        cpu_streams=job.cpu_streams,
        threads=job.threads,
        draft="none",
    )
    return load_model(job.folder, options)[0]


def _outcore_steps(model: Any, session: Session) -> Steps:
    def steps(prompts: Sequence[Sequence[int]], tokens: int) -> Generator[list[int], None, None]:
        prompt = mx.array(list(prompts[0]), dtype=mx.int32)
        step = session.plan.prefill_step
        with wired_limit(model, [generation_stream]):
            for token, *_ in generate_step(prompt, model, max_tokens=tokens, prefill_step_size=step):
                yield [token]

    return steps


register(Mode("mlx-lm", WAYS["mlx-lm"], _open_mlx_lm, False, False))
register(Mode("plain", WAYS["plain"], _open_plain, True, False))
register(Mode("outcore", WAYS["outcore"], _open_outcore, True, True))
