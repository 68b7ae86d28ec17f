"""The modes of ``outcore bench``: mlx-lm's own loop, naive streaming, and Outcore."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.utils
from mlx_lm.generate import BatchGenerator, generation_stream, wired_limit
from mlx_lm.generate import generate_step as resident_step

from outcore.decode.generate import generate_step
from outcore.decode.loader import load_model
from outcore.engine.session import Session
from outcore.machine.device import COMPUTE_DTYPES
from outcore.options import LoadOptions
from outcore.plan.planner import PREFILL_STEP

from .jobs import BenchJob
from .naive_streaming import NaiveStreaming
from .words import AUTO, OUTCORE

Steps = Callable[[Sequence[Sequence[int]], int], Generator[list[int], None, None]]
"""Called with one prompt per sequence and the number of tokens to generate for each. Yields the tokens of each step:
in a batch one per sequence, for a single sequence all that the step gives."""


@dataclass
class Loop:
    """A loaded model and its token loop; ``io`` says how weights are read: ``direct``, ``cached`` or ``none``."""

    model: Any
    steps: Steps
    io: str = "none"
    session: Session | None = None
    close: Callable[[], None] = lambda: None


def mlx_lm_steps(model: Any, prefill_step: int = PREFILL_STEP, one: Callable[..., Any] = resident_step) -> Steps:
    """Returns greedy loops without an end token: ``one`` for one sequence, mlx-lm's ``BatchGenerator`` for several."""

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
    return Loop(plain.model, steps, "cached", None, plain.close)


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
        threads=run.threads,
        draft="none",
    )
    model: Any = load_model(job.folder, options)[0]
    session: Session = model.outcore
    one = generate_step if session.streaming is not None else resident_step
    return Loop(model, mlx_lm_steps(model, session.plan.prefill_step, one), session.io, session, session.close)


LOOPS: dict[str, Callable[[BenchJob], Loop]] = {"mlx-lm": _open_mlx_lm, "plain": _open_plain, OUTCORE: _open_outcore}
"""By mode, the function that loads a job's model; it raises OutcoreError if the mode cannot."""
