"""How much more a sweep is worth when many sequences share it: tokens per second of 1 and of 32, while streaming.

    python benchmarks/batch.py MODEL --dtype float32 --rate 100MB --sequences 1,32 --json FILE

The machine's own disk is too fast for a small model to wait for, so here a RATE-LIMITED READER stands in for it: units
arrive no sooner than ``--rate`` bytes a second would bring them, read one after the other. What is shown is the shape
of streaming from a slow disk, not what this machine's disk does; without ``--rate`` it is this machine's.

Each number of sequences is loaded and run in a process of its own, through ``outcore.batch_generate``. Tokens per
second count from the first sweep's beginning to the last one's end, prompts included.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.utils
from rich.console import Console
from rich.table import Table

import outcore
from limited_reader import limit_reads
from outcore.checkpoint.find_model import resolve_model
from outcore.checks import parse_size
from outcore.engine.session import Session
from outcore.machine.device import COMPUTE_DTYPES
from result_file import write_result

PROMPT = "def read_lines(path):\n    "


def measure(folder: Path, args: argparse.Namespace, sequences: int) -> dict[str, Any]:
    """Answers to as many prompts as sequences, all of the same number of tokens."""
    if args.rate:
        limit_reads(parse_size(args.rate))
    tokenizer = mlx_lm.utils.load_tokenizer(folder)
    prompt = tokenizer.encode(PROMPT)
    # Others than each other, and of one length; an answer that ends early would leave the sweep to fewer.
    prompts = [[*prompt, 5 + i] for i in range(sequences)]
    tokenizer._eos_token_ids = set()
    model, _ = outcore.load_model(
        folder,
        memory=args.memory,
        resident=0,
        dtype=args.dtype,
        context=len(prompts[0]) + args.tokens,
        prompt=len(prompts[0]),
        sequences=sequences,
        draft="none",
        govern=False,
    )
    session: Session = model.outcore
    with session:
        outcore.batch_generate(model, tokenizer, prompts, max_tokens=2)
        session.metrics.reset()
        began = time.perf_counter()
        response = outcore.batch_generate(model, tokenizer, prompts, max_tokens=args.tokens)
        seconds = time.perf_counter() - began
        metrics, plan = session.metrics, session.plan
        assert session.streaming is not None
        return {
            "sequences": sequences,
            "generation_tokens": response.stats.generation_tokens,
            "seconds": seconds,
            "tps": response.stats.generation_tokens / seconds,
            "sweeps": metrics.sweeps,
            "s_per_sweep": seconds / metrics.sweeps,
            "tokens_per_sweep": response.stats.generation_tokens / metrics.sweeps,
            "bytes_per_sweep": plan.bytes_per_token,
            "stall_s": metrics.stall_s,
            "peak_memory_bytes": int(mx.get_peak_memory()) + int(mx.get_cache_memory()),
            "planned_peak_bytes": plan.peak_bytes,
        }


def child(args: argparse.Namespace, sequences: int) -> dict[str, Any]:
    options = [x for name in ("dtype", "rate", "memory") if (v := getattr(args, name)) for x in (f"--{name}", str(v))]
    command = [sys.executable, __file__, args.model, *options, "--tokens", str(args.tokens), "--child", str(sequences)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description="Tokens per second of many sequences and of one, while streaming.")
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--sequences", default="1,32", help="Numbers of them, separated by commas.")
    parser.add_argument("--tokens", type=int, default=12, help="Of each answer.")
    parser.add_argument("--rate", metavar="SIZE", help="Limit reading to so many bytes a second.")
    parser.add_argument("--memory", default="4GB", metavar="SIZE")
    parser.add_argument("--dtype", choices=COMPUTE_DTYPES)
    parser.add_argument("--repeats", type=int, default=1, help="In turn.")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    folder = resolve_model(args.model)
    if args.child:
        print(json.dumps(measure(folder, args, args.child)))
        return 0
    counts = [int(n) for n in args.sequences.split(",")]
    rows = [child(args, n) for _ in range(args.repeats) for n in counts]
    reader = f"rate-limited to {args.rate} a second" if args.rate else "this machine's disk"
    table = Table("sequences", "tok/s", "times", "s a sweep", "tok a sweep", "waited", "peak", "plan", title=reader)
    base = max(r["tps"] for r in rows if r["sequences"] == min(counts))
    for r in rows:
        r["times_of_fewest"] = r["tps"] / base
        table.add_row(
            str(r["sequences"]),
            f"{r['tps']:.2f}",
            f"{r['times_of_fewest']:.1f}",
            f"{r['s_per_sweep']:.2f}",
            f"{r['tokens_per_sweep']:.1f}",
            f"{100 * r['stall_s'] / r['seconds']:.0f} %",
            f"{r['peak_memory_bytes'] / 1e6:.0f} MB",
            f"{r['planned_peak_bytes'] / 1e6:.0f} MB",
        )
    Console().print(table)
    write_result(
        args.json,
        "batch",
        folder,
        model={"name": folder.name, "nbytes": sum(f.stat().st_size for f in folder.glob("*.safetensors"))},
        reader=reader,
        rate_limit_bytes_per_s=parse_size(args.rate) if args.rate else None,
        results=rows,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
