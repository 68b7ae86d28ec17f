"""``outcore demo``: the demo model under a budget smaller than its weights, checked against the resident one."""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from importlib import resources
from pathlib import Path
from statistics import median_low
from typing import Any

from mlx_lm.models.cache import make_prompt_cache

from outcore.checkpoint.tokenizer import load_tokenizer
from outcore.checks import whole
from outcore.cli.arguments import text_of
from outcore.cli.console import PlainConsole, listing
from outcore.cli.engine import ProgressBar, engine_record, sweep_progress
from outcore.decode.budget import asked_budget
from outcore.decode.generate import stream_generate
from outcore.decode.loader import load
from outcore.decode.prompt import encode
from outcore.engine.session import Session
from outcore.errors import MissingFileError, OutcoreError, UsageError
from outcore.machine.allocator import peak_held, reset_peak
from outcore.sizes import format_size

DEMO_PACKAGE = "outcore_demo_model"

WARM_UP = 8
"""Tokens of the text that comes before a timed one."""

Run = dict[str, Any]
"""One text, timed after a shorter one by the same loaded model, as ``--json`` tells it: bytes, seconds."""


def demo_model() -> AbstractContextManager[Path]:
    """The demo model's folder, which is there for as long as the block runs. It is a package of its own, so that
    Outcore's stays small.

    Raises:
        MissingFileError: the package is not installed.
    """
    try:
        folder = resources.files(DEMO_PACKAGE)
    except ModuleNotFoundError as e:
        raise MissingFileError(
            "the demo model is a package of its own, which is not installed: pip install outcore-demo-model; in a "
            "checkout pip install ./demo-model"
        ) from e
    return resources.as_file(folder)


def run(args: argparse.Namespace) -> None:
    """Run the command; it fails where the two runs did not make the same tokens."""
    if args.max_tokens < 2:
        raise UsageError(f"--max-tokens {args.max_tokens}: at least 2, to time one after the first")
    whole("--max-tokens", args.max_tokens)
    whole("--repeats", args.repeats, 1)
    budget = asked_budget(args.memory)
    text_of("--prompt", args.prompt)
    out = PlainConsole(highlight=False)
    runs: dict[str, list[Run]] = {"streamed": [], "resident": []}
    with demo_model() as folder:
        weights = sum(f.stat().st_size for f in folder.glob("*.safetensors"))
        out.print(
            f"A trained 28M-parameter model, {format_size(weights)} of weights: streamed from disk within\n"
            f"{format_size(budget)}, and resident. After a warm-up each is timed, in turns.\n"
        )
        for turn in range(args.repeats):
            runs["streamed"].append(_run(folder, args, budget, out if turn == 0 else None))
            runs["resident"].append(_run(folder, args, max(4 * weights, 100_000_000), None))
    one, other = map(_middle, runs.values())
    same = all(run["tokens"] == one["tokens"] for run in [*runs["streamed"], *runs["resident"]])
    tokens = f"yes, all {len(one['tokens'])}" if same else "NO"
    out.print(listing([("streamed", _said(one)), ("resident", _said(other)), ("same tokens", tokens)]))
    out.print(
        f"Streamed, a token took {other['tps'] / one['tps']:.2f} times as long; {100 * one['waiting']:.0f} % of the "
        f"time was waiting for the disk, which gave {one['read_gbps']:.2f} GB/s."
    )
    args.result.record = {"same_tokens": same, "weight_bytes": weights, "streamed": one, "resident": other}
    if not same:
        raise OutcoreError("the streamed run made other tokens than the resident one; please report this")


def _run(folder: Path, args: argparse.Namespace, memory: int, shown: PlainConsole | None) -> Run:
    """Load the model, have it make a short text, and time the whole one; ``shown``: where that is printed."""
    # The peak is this run's: what the one before it left goes first.
    gc.collect()
    reset_peak()
    with ProgressBar() as bar:
        prompt = int(encode(load_tokenizer(folder, {}), args.prompt).size)
        tokens = prompt + args.max_tokens
        model, tokenizer = load(str(folder), memory=memory, context=tokens, prompt=prompt, draft="none", progress=bar)
        session: Session = model.outcore
        with session:
            first_token = sweep_progress(bar, session)
            for _ in _text(model, tokenizer, args.prompt, min(WARM_UP, args.max_tokens)):
                first_token()
            session.metrics.reset()
            said: list[Any] = []
            began = stalled = 0.0
            for r in _text(model, tokenizer, args.prompt, args.max_tokens):
                if not said:
                    began, stalled = time.perf_counter(), session.metrics.stall_s
                said.append(r)
                if shown is not None:
                    shown.print(r.text if len(said) > 1 else args.prompt + r.text, end="", soft_wrap=True)
            seconds = time.perf_counter() - began
            if shown is not None:
                shown.print("\n")
            return engine_record(session) | {
                "budget": session.plan.budget_bytes,
                "resident_layers": len(session.plan.resident),
                "streamed_layers": len(session.plan.streamed),
                "peak_memory": peak_held(),
                "seconds": seconds,
                "waiting": (session.metrics.stall_s - stalled) / seconds,
                "tokens": [r.token for r in said],
                "text": "".join(r.text for r in said),
                "tps": (len(said) - 1) / seconds,
            }


def _text(model: Any, tokenizer: Any, prompt: str, tokens: int) -> Iterator[Any]:
    """A text by Outcore's own loop, which the resident model too runs in where a cache is given."""
    own: dict[str, Any] = {}
    if model.outcore.streaming is None:
        own = {"prompt_cache": make_prompt_cache(model), "leave_last": True}
    yield from stream_generate(model, tokenizer, prompt, max_tokens=tokens, **own)


def _middle(runs: Sequence[Run]) -> Run:
    """The run of median speed, of an even number the slower of the two; with every speed and the highest peak."""
    speeds = [run["tps"] for run in runs]
    middle = next(run for run in runs if run["tps"] == median_low(speeds))
    return middle | {"peak_memory": max(run["peak_memory"] for run in runs), "tps_of_each": speeds}


def _said(run: Run) -> str:
    layers = run["resident_layers"] + run["streamed_layers"]
    return (
        f"{run['tps']:.1f} tokens a second ({min(run['tps_of_each']):.1f} to {max(run['tps_of_each']):.1f}); "
        f"{run['resident_layers']} of {layers} layers in memory, {format_size(run['peak_memory'])} used at most"
    )
