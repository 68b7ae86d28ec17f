"""A long prompt: seconds to its first token, streamed and resident in turn, beside reading the weights once.

    python benchmarks/long_prompt.py MODEL --prompt-tokens 4096 --rates 5MB,none --dtype float32 --json FILE

Nothing is resident in the streamed rows; all chunks of the prompt are to share one sweep, so that the first token takes
as long as reading the weights once or as computing the prompt, whichever is longer. A rate stands for a disk that is
slow beside computing; ``none`` is this machine's disk, read directly.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import _support  # noqa: F401
import outcore
from limited_reader import limit_reads
from outcore.checkpoint.find_model import resolve_model
from outcore.disk.reader import FileReader
from outcore.engine import binding
from outcore.loading.preparation import prepare
from outcore.plan.planner import resident_budget
from outcore.sizes import parse_size
from result_file import write_result
from stand_ins import TokensOnly


@dataclass
class Run:
    """Of one prompt: seconds to the first token; sweeps, bytes read and seconds of the disk until then."""

    rate: str
    resident: bool
    ttft_s: float
    sweeps: int
    bytes_read: int
    read_s: float
    token: int


@dataclass
class Measured:
    """Runs on a disk of one rate, and bytes that a sweep reads."""

    rate: str
    sweep_bytes: int
    runs: list[Run]


def first_token(model: Any, prompt: list[int], rate: str, resident: bool) -> Run:
    metrics = model.outcore.metrics
    streaming = model.outcore.streaming
    if streaming is not None:
        # What was read ahead is read for this prompt too.
        streaming.drain()
    metrics.reset()
    began = time.perf_counter()
    token = next(outcore.stream_generate(model, TokensOnly(), prompt, max_tokens=2)).token
    took = time.perf_counter() - began
    return Run(rate, resident, took, metrics.sweeps, metrics.bytes_read, metrics.read_s, token)


def measured(folder: Path, rate: str, prompt: list[int], repeats: int, options: dict[str, Any]) -> Measured:
    """Both models on a disk of that rate, in turn."""
    vars(binding)["FileReader"] = FileReader
    if rate != "none":
        limit_reads(parse_size(rate))
    resident, _ = outcore.load_model(folder, **options)
    model, _ = outcore.load_model(folder, resident=0, **options)
    assert resident.outcore.streaming is None and not model.outcore.plan.resident
    # Chunks of the same size, so the same kernels.
    resident.outcore.prefill_step_size = model.outcore.plan.prefill_step
    runs = []
    for n in range(repeats + 1):
        for loaded in (resident, model):
            run = first_token(loaded, prompt if n else prompt[:32], rate, loaded is resident)
            print(*vars(run).values(), sep="\t", file=sys.stderr, flush=True)
            runs += [run] if n else []
    sweep = sum(part.read for part in model.outcore.plan.parts)
    for loaded in (resident, model):
        loaded.outcore.close()
    return Measured(rate, sweep, runs)


def summary(of: Measured) -> dict[str, Any]:
    """The first token's seconds beside those of computing and of reading the weights once."""
    streamed = [r for r in of.runs if not r.resident]
    compute = statistics.median(r.ttft_s for r in of.runs if r.resident)
    ttft = statistics.median(r.ttft_s for r in streamed)
    rate = parse_size(of.rate) if of.rate != "none" else statistics.median(r.bytes_read / r.read_s for r in streamed)
    read = of.sweep_bytes / rate
    return {
        "rate": of.rate,
        "ttft_s": ttft,
        "compute_s": compute,
        "read_s": read,
        "over_the_longer": ttft / max(read, compute),
        "sweeps": sorted({r.sweeps for r in streamed}),
        "same_token": len({r.token for r in of.runs}) == 1,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Seconds to the first token of a long prompt.")
    parser.add_argument("model")
    parser.add_argument("--prompt-tokens", type=int, default=4096)
    parser.add_argument("--rates", default="none")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--memory", help="Default: what everything resident takes.")
    parser.add_argument("--dtype")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    folder = resolve_model(args.model)
    prompt = [5 + (7919 * i) % 1000 for i in range(args.prompt_tokens)]
    options: dict[str, Any] = {
        "context": args.prompt_tokens + 8,
        "prompt": args.prompt_tokens,
        "dtype": args.dtype,
        "draft": "none",
        "govern": False,
        "io": "direct",
    }
    known = {name: options[name] for name in ("context", "prompt", "dtype", "draft")}
    options["memory"] = args.memory or resident_budget(prepare(folder, **known, least=True).profile.size)
    runs: list[Run] = []
    found = []
    for rate in args.rates.split(","):
        of_rate = measured(folder, rate, prompt, args.repeats, options)
        found.append(summary(of_rate))
        print(json.dumps(found[-1]))
        runs += of_rate.runs
    write_result(args.json, "long_prompt", folder, summary=found, runs=[asdict(r) for r in runs])
    return 0


if __name__ == "__main__":
    sys.exit(main())
