"""The test behind every optimisation: a streamed model's logits equal mlx-lm's resident ones bit for bit.

Used by the tests on tiny models and by ``bench/equality.py`` on real ones.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.utils
from mlx_lm.models.cache import make_prompt_cache

from outcore import load_model
from outcore.loader import COMPUTE_DTYPES, Session

# Some architectures of mlx-lm compress the cache in groups and take no second prompt chunk: then one chunk, one step.
CHUNKS = [[5, 6, 7, 8, 9], [1, 2, 3], [4]]
STEPS = [11, 12, 13]


def resident_logits(folder: Path, dtype: str | None = None) -> tuple[list[mx.array], bool]:
    """mlx-lm's own logits for the chunks and steps, and whether the model takes several chunks."""
    model, _ = mlx_lm.utils.load_model(folder)
    if dtype is not None:
        model.set_dtype(COMPUTE_DTYPES[dtype])
    try:
        return _by_sweeps(model, CHUNKS, STEPS), True
    except ValueError:
        return _by_sweeps(model, CHUNKS[:1], STEPS[:1]), False


def _by_sweeps(model: Any, chunks: list[list[int]], steps: list[int]) -> list[mx.array]:
    cache = make_prompt_cache(model)
    out = []
    for ids in [*chunks, *([s] for s in steps)]:
        out.append(model(mx.array([ids]), cache=cache))
        mx.eval(out[-1], [c.state for c in cache])
    return out


def _in_one_sweep(model: Any, chunks: list[list[int]], steps: list[int]) -> list[mx.array]:
    """The chunks share one sweep, then a sweep for each step."""
    session: Session = model.outcore
    if session.streaming is None or session.streaming.evaluates:
        return _by_sweeps(model, chunks, steps)
    cache = make_prompt_cache(model)
    passes: list[Callable[[], mx.array]] = [lambda ids=ids: model(mx.array([ids]), cache=cache) for ids in chunks]
    out = session.streaming.sweep(passes)
    mx.eval(out, [c.state for c in cache])
    for s in steps:
        out.append(model(mx.array([[s]]), cache=cache))
        mx.eval(out[-1])
    return out


def differences(folder: Path, dtype: str | None = None, **options: Any) -> tuple[list[str], list[Session]]:
    """What differs from mlx-lm at 0 %, 50 % and 100 % resident, as lines; and the sessions, for what they counted."""
    expected, chunked = resident_logits(folder, dtype)
    chunks, steps = (CHUNKS, STEPS) if chunked else (CHUNKS[:1], STEPS[:1])
    found: list[str] = []
    sessions: list[Session] = []
    layers = 0
    for share in (0.0, 0.5, 1.0):
        model, _ = load_model(folder, memory="8GB", resident=int(layers * share), context=64, dtype=dtype, **options)
        session: Session = model.outcore
        layers = len(session.size.layers)
        sessions.append(session)
        with session:
            for how, run in (("a sweep a chunk", _by_sweeps), ("one sweep", _in_one_sweep)):
                got = run(model, chunks, steps)
                for i, (a, b) in enumerate(zip(got, expected, strict=True)):
                    if not mx.array_equal(a, b, equal_nan=True).item():
                        worst = mx.abs(a.astype(mx.float32) - b.astype(mx.float32)).max().item()
                        found.append(f"{share:.0%} resident, {how}, pass {i}: off by up to {worst}")
    return found, sessions
