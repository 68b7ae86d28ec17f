"""``outcore demo``: the embedded model under a budget smaller than its weights, checked against the resident one."""

from __future__ import annotations

import argparse
import gc
import time
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import mlx.core as mx
from rich.console import Console
from rich.table import Table

from ..errors import OutcoreError, UsageError
from ..generation.generate import stream_generate
from ..generation.prompt import encode
from ..loading.loader import load
from ..model.tokenizer import load_tokenizer
from ..options import whole
from ..runtime.session import Session
from ..sizes import format_size
from ..system.memory import asked_budget
from .engine import engine_record, peak_memory_bytes, plain_console, progress_bar, sweep_progress, text_of


@dataclass(frozen=True)
class Run:
    """One run of the demo, sizes in bytes, speeds in tokens per second."""

    budget: int
    resident_layers: int
    streamed_layers: int
    peak_memory: int
    tps: float
    read_gbps: float
    sweeps: int
    tokens: list[int]
    text: str


def run(args: argparse.Namespace) -> None:
    """Run the command.

    Raises:
        OutcoreError: the two runs did not make the same tokens.
    """
    if args.max_tokens < 2:
        raise UsageError(f"--max-tokens {args.max_tokens}: at least 2, to time one after the first")
    whole("--max-tokens", args.max_tokens)
    budget = asked_budget(args.memory)
    text_of("--prompt", args.prompt)
    console = plain_console(highlight=False)
    with resources.as_file(resources.files("outcore") / "demo_model") as folder:
        weights = sum(f.stat().st_size for f in folder.glob("*.safetensors"))
        console.print(
            f"A trained 28M-parameter model, {format_size(weights)} of weights, run twice: "
            f"streamed from disk within {format_size(budget)}, then resident.\n"
        )
        streamed, record = _run(folder, args, console, memory=budget, show=True)
        resident, _ = _run(folder, args, console, memory=max(4 * weights, 100_000_000), show=False)
    same = streamed.tokens == resident.tokens
    console.print(_table(streamed, resident, weights, same))
    report: dict[str, Any] = {"same_tokens": same, "weight_bytes": weights}
    report |= {"streamed": asdict(streamed) | record, "resident": asdict(resident)}
    args.result.record = report
    if not same:
        raise OutcoreError("the streamed run made other tokens than the resident one; please report this")


def _run(
    folder: Path, args: argparse.Namespace, console: Console, *, memory: str | int, show: bool
) -> tuple[Run, dict[str, Any]]:
    with progress_bar() as bar:
        prompt = _prompt_tokens(folder, args.prompt)
        model, tokenizer = load(
            str(folder), memory=memory, context=prompt + args.max_tokens, prompt=prompt, draft="none", progress=bar
        )
        session: Session = model.outcore
        with session:
            first_token = sweep_progress(bar, session)
            tokens: list[int] = []
            text = ""
            began = 0.0
            for r in stream_generate(model, tokenizer, args.prompt, max_tokens=args.max_tokens):
                if not tokens:
                    first_token()
                    began = time.perf_counter()
                    if show:
                        console.print(args.prompt, end="", markup=False, style="dim")
                tokens.append(r.token)
                text += r.text
                if show:
                    console.print(r.text, end="", markup=False, soft_wrap=True)
            seconds = time.perf_counter() - began
            if show:
                console.print("\n")
            run = Run(
                budget=session.plan.budget_bytes,
                resident_layers=len(session.plan.resident),
                streamed_layers=len(session.plan.streamed),
                peak_memory=peak_memory_bytes(),
                tps=round((len(tokens) - 1) / seconds, 2),
                read_gbps=round(session.metrics.read_gbps, 3),
                sweeps=session.metrics.sweeps,
                tokens=tokens,
                text=text,
            )
            record = engine_record(session)
    # The next run's peak starts from what this one leaves.
    del model, session
    gc.collect()
    mx.clear_cache()
    return run, record


def _prompt_tokens(folder: Path, prompt: str) -> int:
    return int(encode(load_tokenizer(folder, {}), prompt).size)


def _table(streamed: Run, resident: Run, weights: int, same: bool) -> Table:
    table = Table()
    for column, justify in (("", "left"), ("streamed", "right"), ("resident", "right")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    rows = [
        ("same tokens", f"{'yes' if same else 'NO'}, all {len(streamed.tokens)}" if same else "NO", ""),
        ("memory budget", format_size(streamed.budget), "-"),
        ("memory used at most", format_size(streamed.peak_memory), format_size(resident.peak_memory)),
        ("weights on disk", format_size(weights), format_size(weights)),
        ("layers in memory", _of(streamed), _of(resident)),
        ("tokens per second", f"{streamed.tps:.1f}", f"{resident.tps:.1f}"),
        ("SSD rate", f"{streamed.read_gbps:.2f} GB/s", "-"),
        ("sweeps over the weights", str(streamed.sweeps), "-"),
    ]
    for row in rows:
        table.add_row(*row)
    return table


def _of(run: Run) -> str:
    return f"{run.resident_layers} of {run.resident_layers + run.streamed_layers}"
