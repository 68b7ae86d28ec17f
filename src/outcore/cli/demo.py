"""``outcore demo``: the demo model under a budget smaller than its weights, checked against the resident one."""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlx_lm.models.cache import make_prompt_cache
from rich.console import Console
from rich.table import Table

from ..checkpoint.demo_model import demo_model
from ..checkpoint.tokenizer import load_tokenizer
from ..decode.generate import stream_generate
from ..decode.prompt import encode
from ..engine.session import Session
from ..errors import OutcoreError, UsageError
from ..loading.loader import load
from ..machine.allocator import reset_peak
from ..machine.memory import asked_budget
from ..options import whole
from ..sizes import format_size
from .arguments import text_of
from .console import PlainConsole
from .engine import engine_record, peak_memory_bytes, progress_bar, sweep_progress

WARM_UP = 8
"""Tokens of the text that comes before a timed one."""


@dataclass(frozen=True)
class TimedRun:
    """One text, timed after a shorter one by the same loaded model. Sizes in bytes, times in seconds.

    Attributes:
        seconds: from the first token to the last.
        waiting: of them, the share in which the loop waited for the disk.
        peak_memory: from loading to the end.
        record: what the engine counted, for ``--json``.
    """

    budget: int
    resident_layers: int
    streamed_layers: int
    peak_memory: int
    seconds: float
    waiting: float
    read_gbps: float
    sweeps: int
    tokens: list[int]
    text: str
    record: dict[str, Any]

    @property
    def tps(self) -> float:
        """Tokens a second, those after the first."""
        return (len(self.tokens) - 1) / self.seconds


def run(args: argparse.Namespace) -> None:
    """Run the command.

    Raises:
        MissingFileError: the demo model is not installed.
        OutcoreError: the two runs did not make the same tokens.
    """
    if args.max_tokens < 2:
        raise UsageError(f"--max-tokens {args.max_tokens}: at least 2, to time one after the first")
    whole("--max-tokens", args.max_tokens)
    whole("--repeats", args.repeats, 1)
    budget = asked_budget(args.memory)
    text_of("--prompt", args.prompt)
    console = PlainConsole(highlight=False)
    with demo_model() as folder:
        weights = sum(f.stat().st_size for f in folder.glob("*.safetensors"))
        times = "once" if args.repeats == 1 else f"{args.repeats} times"
        console.print(
            f"A trained 28M-parameter model, {format_size(weights)} of weights: streamed from disk within\n"
            f"{format_size(budget)}, and resident. After a warm-up each is timed {times}, in turns.\n"
        )
        streamed: list[TimedRun] = []
        resident: list[TimedRun] = []
        for turn in range(args.repeats):
            streamed.append(_run(folder, args, console, memory=budget, show=turn == 0))
            resident.append(_run(folder, args, console, memory=max(4 * weights, 100_000_000), show=False))
    same = all(run.tokens == streamed[0].tokens for run in streamed + resident)
    console.print(_table(streamed, resident, weights, same))
    console.print(_seen(streamed, resident))
    report: dict[str, Any] = {"same_tokens": same, "weight_bytes": weights}
    report |= {"streamed": _record(streamed), "resident": _record(resident)}
    args.result.record = report
    if not same:
        raise OutcoreError("the streamed run made other tokens than the resident one; please report this")


def _run(folder: Path, args: argparse.Namespace, console: Console, *, memory: str | int, show: bool) -> TimedRun:
    """Load the model, have it make a short text, and time the whole one."""
    # The peak is this run's: what the one before it left goes first.
    gc.collect()
    reset_peak()
    with progress_bar() as bar:
        prompt = _prompt_tokens(folder, args.prompt)
        model, tokenizer = load(
            str(folder), memory=memory, context=prompt + args.max_tokens, prompt=prompt, draft="none", progress=bar
        )
        session: Session = model.outcore
        with session:
            first_token = sweep_progress(bar, session)
            for _ in _text(model, tokenizer, args.prompt, min(WARM_UP, args.max_tokens)):
                first_token()
            session.metrics.reset()
            if show:
                console.print(args.prompt, end="", markup=False, style="dim")
            tokens: list[int] = []
            text = ""
            began = stalled = 0.0
            for r in _text(model, tokenizer, args.prompt, args.max_tokens):
                if not tokens:
                    began, stalled = time.perf_counter(), session.metrics.stall_s
                tokens.append(r.token)
                text += r.text
                if show:
                    console.print(r.text, end="", markup=False, soft_wrap=True)
            seconds = time.perf_counter() - began
            if show:
                console.print("\n")
            run = TimedRun(
                budget=session.plan.budget_bytes,
                resident_layers=len(session.plan.resident),
                streamed_layers=len(session.plan.streamed),
                peak_memory=peak_memory_bytes(),
                seconds=seconds,
                waiting=(session.metrics.stall_s - stalled) / seconds,
                read_gbps=round(session.metrics.read_gbps, 3),
                sweeps=session.metrics.sweeps,
                tokens=tokens,
                text=text,
                record=engine_record(session),
            )
    return run


def _text(model: Any, tokenizer: Any, prompt: str, tokens: int) -> Iterator[Any]:
    """A text by Outcore's own loop, which the resident model too runs in where a cache is given."""
    own: dict[str, Any] = {}
    if model.outcore.streaming is None:
        own = {"prompt_cache": make_prompt_cache(model), "leave_last": True}
    yield from stream_generate(model, tokenizer, prompt, max_tokens=tokens, **own)


def _prompt_tokens(folder: Path, prompt: str) -> int:
    return int(encode(load_tokenizer(folder, {}), prompt).size)


def _record(runs: list[TimedRun]) -> dict[str, Any]:
    """The runs of one way for ``--json``: the median's, and every speed."""
    middle = _middle(runs)
    fields = {f: v for f, v in asdict(middle).items() if f not in ("record", "peak_memory")}
    return (
        fields
        | middle.record
        | {
            "peak_memory": max(run.peak_memory for run in runs),
            "tps": round(middle.tps, 2),
            "tps_of_each": [round(run.tps, 2) for run in runs],
        }
    )


def _middle(runs: list[TimedRun]) -> TimedRun:
    """The run of median speed; of an even number the slower of the two."""
    return sorted(runs, key=lambda run: run.tps)[(len(runs) - 1) // 2]


def _table(streamed: list[TimedRun], resident: list[TimedRun], weights: int, same: bool) -> Table:
    table = Table()
    for column, justify in (("", "left"), ("streamed", "right"), ("resident", "right")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    one, other = _middle(streamed), _middle(resident)
    rows = [
        ("same tokens", f"yes, all {len(one.tokens)}" if same else "NO", ""),
        ("memory budget", format_size(one.budget), "-"),
        ("memory used at most", *(format_size(max(run.peak_memory for run in runs)) for runs in (streamed, resident))),
        ("weights on disk", format_size(weights), format_size(weights)),
        ("layers in memory", _of(one), _of(other)),
        ("tokens per second, median", f"{one.tps:.1f}", f"{other.tps:.1f}"),
        ("slowest to fastest", _spread(streamed), _spread(resident)),
        ("time waiting for the disk", f"{100 * one.waiting:.0f} %", "-"),
        ("SSD rate while reading", f"{one.read_gbps:.2f} GB/s", "-"),
        ("sweeps over the weights", str(one.sweeps), "-"),
    ]
    for row in rows:
        table.add_row(*row)
    return table


def _spread(runs: list[TimedRun]) -> str:
    return f"{min(run.tps for run in runs):.1f} to {max(run.tps for run in runs):.1f}"


def _seen(streamed: list[TimedRun], resident: list[TimedRun]) -> str:
    """What the two speeds say of streaming, and what they do not."""
    one, other = _middle(streamed), _middle(resident)
    overlap = min(r.tps for r in resident) <= max(r.tps for r in streamed) and (
        min(r.tps for r in streamed) <= max(r.tps for r in resident)
    )
    waited = f"{100 * one.waiting:.0f} % of the time was waiting for the disk."
    if one.tps > 1.05 * other.tps:
        return (
            f"The streamed runs were faster; {waited}\n"
            "The disk does not make them so: both compute the same. It is the machine, and\n"
            "what else runs on it; try again with more --repeats."
        )
    if overlap and len(streamed) > 1:
        return f"The speeds overlap. Streamed, {waited}\nAll other reading went on while the model computed."
    return f"Streamed, a token took {other.tps / one.tps:.2f} times as long: {waited}"


def _of(run: TimedRun) -> str:
    return f"{run.resident_layers} of {run.resident_layers + run.streamed_layers}"
