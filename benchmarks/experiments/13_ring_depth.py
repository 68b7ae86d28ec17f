"""How much of the longer of reading and computing a sweep reaches, by the number of slots. Throw-away.

    python benchmarks/experiments/13_ring_depth.py llama-4gb --memory 1.32GB --slots 3,4,6,0 --rounds 3

In turns, each in a process of its own (0: the plan's own choice). A sweep's seconds, those with a read under way, the
busiest compute thread's own time (Linux), the larger of these two over the first, and what others used of the cores:
from 0.1 on a line says nothing. Medians of a run's tokens but the first two.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from statistics import median
from typing import Any

import mlx.core as mx

from outcore.decode.generate_step import generate_step
from outcore.loading.loader import load_model
from outcore.machine.neighbours import Neighbours
from outcore.machine.stopwatch import other_threads

PROMPT = 16


def run(model_path: str, memory: str, slots: int, tokens: int, dtype: str | None) -> dict[str, Any]:
    options: dict[str, Any] = {"slots": slots} if slots else {}
    model, _ = load_model(
        model_path, memory=memory, context=PROMPT + tokens + 8, prompt=PROMPT, dtype=dtype, draft="none", **options
    )
    session = model.outcore
    plan, metrics = session.plan, session.metrics
    steps = generate_step(
        mx.arange(5, 5 + PROMPT),
        model,
        lambda: session.streaming,
        max_tokens=tokens + 3,
        prefill_step_size=plan.prefill_step,
    )
    for _ in range(3):
        next(steps)
    readers = {str(t.native_id) for t in threading.enumerate() if t.name.startswith("outcore-read")}
    others = Neighbours()
    rows: list[tuple[float, float, float, float]] = []

    def mark() -> tuple[float, float, dict[str, float]]:
        return time.perf_counter(), metrics.reading()[1], other_threads() or {}

    before = mark()
    for _ in range(tokens):
        next(steps)
        now = mark()
        took = {name: s - before[2].get(name, 0.0) for name, s in now[2].items()}
        computing = max((s for name, s in took.items() if name not in readers), default=0.0)
        reading_cpu = sum(s for name, s in took.items() if name in readers)
        rows.append((now[0] - before[0], now[1] - before[1], computing, reading_cpu))
        before = now
    load = others.whole()
    seconds, reading, computing, reading_cpu = (median(column) for column in zip(*rows, strict=True))
    session.close()
    return {
        "slots": plan.slots,
        "unit_mb": round(plan.unit_bytes / 1e6, 1),
        "resident": plan.held,
        "gb": round(plan.bytes_per_token / 1e9, 3),
        "predicted_s": round(plan.token_s, 4),
        "seconds": round(seconds, 4),
        "reading_s": round(reading, 4),
        "computing_s": round(computing, 4),
        "readers_cpu_s": round(reading_cpu, 4),
        "reached": round(max(reading, computing) / seconds, 3),
        "load": load if load is None else round(load, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--memory", required=True)
    parser.add_argument("--dtype")
    parser.add_argument("--slots", default="3,4,6,0")
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        print(json.dumps(run(args.model, args.memory, args.child, args.tokens, args.dtype)))
        return
    for _ in range(args.rounds):
        for slots in args.slots.split(","):
            done = subprocess.run(
                [sys.executable, __file__, *sys.argv[1:], "--child", slots], capture_output=True, text=True
            )
            print(done.stdout.splitlines()[-1] if done.returncode == 0 else done.stderr[-300:], flush=True)


if __name__ == "__main__":
    main()
