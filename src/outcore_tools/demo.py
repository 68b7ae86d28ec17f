"""``outcore demo``: runs the demo model streamed, with what ``--draft auto`` does, and resident; compares tokens and
speed."""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from importlib import resources
from pathlib import Path
from typing import Any

from mlx_lm.models.cache import make_prompt_cache

from outcore.checkpoint.tokenizer import load_tokenizer
from outcore.checks import whole
from outcore.cli.console import PlainConsole, listing
from outcore.cli.engine import ProgressBar, engine_record, prefill_progress
from outcore.cli.flags import text_of
from outcore.decode.budget import asked_budget
from outcore.decode.generate import stream_generate
from outcore.decode.loader import load
from outcore.decode.prompt import encode
from outcore.errors import MissingFileError, OutcoreError, UsageError
from outcore.machine.allocator import reset_peak
from outcore.plan.joint_plan import AUTO, NGRAM, NONE
from outcore.sizes import format_size

DEMO_PACKAGE = "outcore_demo_model"

# The memory that its drafter takes, with its states.
DRAFTER_BYTES = 3_000_000

# Tokens of the warm-up; with drafts, of which it is found out meanwhile whether they pay.
WARM_UP, FINDING = 8, 64


def demo_model() -> AbstractContextManager[Path]:
    """Yields the demo model's folder; raises MissingFileError if its package is not installed."""
    try:
        folder = resources.files(DEMO_PACKAGE)
    except ModuleNotFoundError as e:
        raise MissingFileError(
            "the demo model is not installed; run pip install outcore-demo-model (in a checkout: pip install "
            "./demo-model)"
        ) from e
    return resources.as_file(folder)


def run(args: argparse.Namespace) -> None:
    if args.max_tokens < 2:
        raise UsageError(f"--max-tokens {args.max_tokens}: give at least 2, as the time starts at the first token")
    whole("--max-tokens", args.max_tokens)
    budget = asked_budget(args.memory)
    text_of("--prompt", args.prompt)
    out = PlainConsole(highlight=False)
    with demo_model() as folder:
        weights = sum(f.stat().st_size for f in folder.glob("*.safetensors"))
        out.print(
            f"A trained 28M-parameter model with {format_size(weights)} of weights runs three times: streamed from "
            f"disk within {format_size(budget)}; the same with {format_size(DRAFTER_BYTES)} more, for the model's "
            "drafter if --draft auto finds that it pays; and resident (all in memory). Each is timed after a "
            "warm-up.\n"
        )
        streamed = _run(folder, args, budget)
        drafted = _run(folder, args, budget + DRAFTER_BYTES, AUTO)
        resident = _run(folder, args, max(4 * weights, 100_000_000))
    out.print(f"{args.prompt}{streamed['text']}\n", soft_wrap=True)
    same = streamed["tokens"] == drafted["tokens"] == resident["tokens"]
    tokens = f"yes, all {len(streamed['tokens'])}" if same else "NO"
    lines = [("streamed", _line(streamed)), ("--draft auto", _line(drafted)), ("resident", _line(resident))]
    out.print(listing([*lines, ("same tokens", tokens)]))
    slower, waited = resident["tps"] / streamed["tps"], 100 * streamed["waiting"]
    out.print(
        f"Streamed, a token took {slower:.2f} times as long; {waited:.0f} % of the time went into waiting for the "
        f"disk, which delivered {streamed['read_gbps']:.2f} GB/s. With --draft auto, {_drafts(drafted)}."
    )
    runs = {"streamed": streamed, "drafted": drafted, "resident": resident}
    args.result.record = {"same_tokens": same, "weight_bytes": weights, **runs}
    if not same:
        raise OutcoreError("the runs' tokens differ; this is a bug, please report it")


def _run(folder: Path, args: argparse.Namespace, memory: int, draft: str = NONE) -> dict[str, Any]:
    # Frees the previous run's memory, so that the peak is this run's.
    gc.collect()
    reset_peak()
    prompt = int(encode(load_tokenizer(folder, {}), args.prompt).size)
    sizes = {"context": prompt + args.max_tokens, "prompt": prompt}
    with ProgressBar() as bar:
        model, tokenizer = load(str(folder), memory=memory, **sizes, draft=draft, progress=bar)
        with model.outcore as session:
            first_token = prefill_progress(bar, session)
            for _ in _text(model, tokenizer, args.prompt, min(WARM_UP if draft == NONE else FINDING, args.max_tokens)):
                first_token()
            session.metrics.reset()
            responses = _text(model, tokenizer, args.prompt, args.max_tokens)
            text = [next(responses)]
            began, stalled, passes = time.perf_counter(), session.metrics.stall_s, session.metrics.sweeps
            text += responses
            seconds = time.perf_counter() - began
            return engine_record(session) | {
                "drafter": session.drafting.name if session.drafting is not None and session.size.drafted else NONE,
                "seconds": seconds,
                "waiting": (session.metrics.stall_s - stalled) / seconds,
                "tokens_a_pass": (len(text) - 1) / max(1, session.metrics.sweeps - passes),
                "tokens": [r.token for r in text],
                "text": "".join(r.text for r in text),
                "tps": (len(text) - 1) / seconds,
            }


def _text(model: Any, tokenizer: Any, prompt: str, tokens: int) -> Iterator[Any]:
    """Generates with Outcore's loop; the cache that is passed makes a resident model use it too, not mlx-lm's loop."""
    own: dict[str, Any] = {}
    if model.outcore.streaming is None:
        own = {"prompt_cache": make_prompt_cache(model), "leave_last": True}
    yield from stream_generate(model, tokenizer, prompt, max_tokens=tokens, **own)


def _drafts(run: dict[str, Any]) -> str:
    """Says what drafted in the end, and what that gave."""
    if run["drafter"] == NONE:
        return "nothing was drafted in the end: the memory is worth more to layers here"
    what = "repetitions were" if run["drafter"] == NGRAM else "the drafter was"
    few = "" if run["tokens_a_pass"] > 1.5 else ", as guesses cost more than they give where computing is the limit"
    return f"{what} used, and each pass over the weights gave {run['tokens_a_pass']:.2f} tokens{few}"


def _line(run: dict[str, Any]) -> str:
    layers, peak = run["resident_units"] + run["streamed_units"], format_size(run["peak_memory_bytes"])
    return f"{run['tps']:.1f} tokens/s; {run['resident_units']} of {layers} layers in memory, peak {peak}"
