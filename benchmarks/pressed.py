"""What under_pressure.py runs in processes of their own: a model, a neighbour that takes memory, a reader."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx

import benchmark
import outcore
from benchmark import Result
from outcore.checkpoint.checkpoint import open_checkpoint
from outcore.decode.preparation import prepare
from outcore.machine.memory import peak_rss, process_memory_limit
from outcore_bench.disk import disk_rate
from outcore_bench.measure import prompt_ids

DISK_BYTES = 1_000_000_000


def generate(folder: str, tokens: int, prompt_tokens: int, **options: Any) -> Result:
    """Outcore's own loop, a line of standard output for each token; ``options`` go to ``outcore.load``."""
    options |= {"context": prompt_tokens + tokens, "prompt": prompt_tokens}
    wanted = prepare(folder, **options).plan
    began = time.perf_counter()
    model, tokenizer = outcore.load(folder, draft="none", **options)
    session = model.outcore
    tokenizer.eos_token_ids = set()  # random weights may end a text anywhere
    planned = session.plan
    stamps, ids, resident, free = [time.perf_counter()], [], [], []
    for r in outcore.stream_generate(model, tokenizer, prompt_ids(prompt_tokens), max_tokens=tokens):
        stamps.append(time.perf_counter())
        ids.append(r.token)
        resident.append(len(session.plan.resident))
        free.append(process_memory_limit().available)
        print(json.dumps({"token": len(ids), "resident": resident[-1], "free": free[-1]}))
    watch = session.watch
    moves = watch.moves if watch is not None else []
    session.close()
    return {
        "tokens": ids,
        "load_s": stamps[0] - began,
        "ttft_s": stamps[1] - stamps[0],
        "seconds": [b - a for a, b in itertools.pairwise(stamps[1:])],
        "resident_units": resident,
        "free_bytes": free,
        "budget_bytes": planned.budget_bytes,
        "planned_peak_bytes": planned.peak_bytes,
        "planned_resident_units": len(wanted.resident),
        "loaded_resident_units": len(planned.resident),
        "layers": len(planned.resident) + len(planned.streamed),
        "slots": planned.slots,
        "io": session.io,
        "peak_memory_bytes": mx.get_peak_memory(),
        "peak_rss_bytes": peak_rss(),
        "misses": session.metrics.misses,
        "decisions": [{"pass": at, "shed": max(0, -n), "regrow": max(0, n)} for at, n in moves],
    }


def neighbour() -> Result:
    """Takes and frees memory as the lines of standard input say: bytes in all that it shall hold."""
    held: list[bytearray] = []
    for line in sys.stdin:
        wanted = int(line)
        while sum(map(len, held)) > wanted:
            held.pop()
        if (more := wanted - sum(map(len, held))) > 0:
            block = bytearray(more)
            block[::4096] = b"\1" * len(range(0, more, 4096))
            held.append(block)
        print(sum(map(len, held)))
    return {}


def disk(folder: str) -> Result:
    """GB/s that a reader gets of the weight files which does nothing else."""
    return asdict(disk_rate(open_checkpoint(Path(folder)).files, threads=(4,), most=DISK_BYTES))


CHILDREN: dict[str, Callable[..., Result]] = {"generate": generate, "neighbour": neighbour, "disk": disk}


def command(kind: str, options: Result) -> list[str]:
    """What runs one of them."""
    return benchmark.child_command(__file__, kind, options)


if __name__ == "__main__":
    sys.exit(benchmark.child(CHILDREN, sys.argv[1:]))
