"""What a sweep costs in which prompts join: by their number and length, beside sweeps that only decode.

    python benchmarks/joining.py MODEL --memory 3.4GB --prompts 1x60,8x60,31x60,32x20 --json FILE

Sequences join ``Continuous``, the loop behind `outcore serve`, all in one step; no HTTP. Told of that step: seconds,
how many passes there were and of how many tokens each, seconds waited for the disk, MLX's memory at its highest against
the limit at which MLX waits for running work before it allocates, and against the plan; then of steps that only decode.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import mlx.core as mx

import outcore
from outcore.checkpoint.find_model import resolve_model
from outcore.decode.batch_engine import Request
from outcore.decode.continuous import Continuous
from outcore.decode.model_runner import chunks
from outcore.engine.session import Session
from result_file import write_result

DECODING = 4
"""Steps behind the one in which prompts join."""


def memory_limit() -> int:
    """MLX's now."""
    limit = mx.set_memory_limit(2**62)
    mx.set_memory_limit(limit)
    return int(limit)


def joined(model: Any, sequences: Continuous, prompts: int, tokens: int) -> dict[str, Any]:
    """So many prompts of so many tokens join at once."""
    session: Session = model.outcore
    m = session.metrics
    for n in range(prompts):
        ids = [(7 * n + 13 * i) % 200 + 3 for i in range(tokens)]
        sequences.add(Request(n, ids, DECODING + 2))
    mx.reset_peak_memory()
    m.reset()
    m.timeline = []
    began = time.perf_counter()
    step = sequences.step()
    seconds = time.perf_counter() - began
    if len(step.tokens) < prompts:
        raise SystemExit(f"{prompts} prompts of {tokens} tokens: only {len(step.tokens)} fit")
    computing = [e.end - e.begin for e in m.timeline if e.kind == "compute"]
    plan, each = session.plan, [p.stop - p.start for p in chunks(tokens, session.plan.prefill_step)]
    found = {
        "prompts": prompts,
        "tokens": tokens,
        "joining_s": round(seconds, 3),
        "passes": prompts * (len(each) - 1) + 1,
        "chunk": plan.prefill_step,
        "sweeps": m.sweeps,
        "stall_s": round(m.stall_s, 3),
        "slowest_unit_s": round(max(computing, default=0.0), 3),
        "median_unit_s": round(statistics.median(computing or [0.0]), 4),
        "resident_layers": len(plan.resident),
        "peak_bytes": int(mx.get_peak_memory()),
        "limit_bytes": memory_limit(),
        "planned_bytes": plan.peak_bytes,
    }
    m.timeline = None
    times = []
    for _ in range(DECODING):
        began = time.perf_counter()
        sequences.step()
        times.append(time.perf_counter() - began)
    sequences.remove(range(prompts))
    sequences.step()
    return found | {"decoding_s": round(statistics.median(times), 3)}


def main() -> None:
    """Run it and print a line for each number and length of prompts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--memory", required=True)
    parser.add_argument("--prompts", default="1x60,8x60,16x60,31x60,32x20", metavar="NxTOKENS,...")
    parser.add_argument("--prefill-step-size", type=int)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    folder = resolve_model(args.model)
    model, _ = outcore.load_model(folder, memory=args.memory, draft="none", govern=False)
    rows = []
    with model.outcore:
        sequences = Continuous(model, prefill_step=args.prefill_step_size)
        joined(model, sequences, 1, 4)
        for word in args.prompts.split(","):
            prompts, tokens = map(int, word.split("x"))
            rows.append(joined(model, sequences, prompts, tokens))
            print(rows[-1], flush=True)
    write_result(args.json, "joining", folder, rows=rows)


if __name__ == "__main__":
    main()
