"""One question, a few variants, measured in turn: what every script in this folder shares.

Each variant runs in a process of its own, `--repeats` times, the variants taking turns, so that a drifting machine
meets all of them. Result: a table, one JSON document with the machine and every command line, and a verdict in words.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rich.console import Console
from rich.table import Table

from outcore_bench.fingerprint import machine
from outcore_bench.page_cache import drop_page_cache

Variants = dict[str, dict[str, Any]]
Rows = dict[str, dict[str, Any]]
SCHEMA = "outcore-experiment/1"


def placed(kind: str) -> Callable[[int, int], list[int]]:
    """Which ``count`` layers out of ``of`` stay resident: ``first``, ``last``, or ``interleaved`` from the first on."""
    if kind == "first":
        return lambda count, of: list(range(count))
    if kind == "last":
        return lambda count, of: list(range(of - count, of))
    return lambda count, of: [i * of // count for i in range(count)]


def sublayers(model: Any) -> list[Any]:
    """The parts of every layer (attention, MLP) as units of their own, in place of whole layers."""
    from outcore.modules.layers import Layer, Parameter, find_layers

    found = []
    for layer in find_layers(model):
        parts: dict[str, list[Parameter]] = {}
        for p in layer.parameters:
            head, _, rest = p.path.partition(".")
            parts.setdefault(head, []).append(Parameter(rest, p.module, p.key))
        found += [Layer(f"{layer.path}.{head}", layer.module[head], tuple(ps)) for head, ps in parts.items()]
    return found


@contextlib.contextmanager
def engine(options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The engine with another choice built in; yields what is left of the options, for ``load_model``."""
    from outcore.disk import reader, ring
    from outcore.engine import model_profile
    from outcore.engine import streaming as stream
    from outcore.loading import loader
    from outcore.machine.device_memory import prepare_slot as prepare
    from outcore.plan import planner

    options = dict(options)
    file_reader = reader.FileReader
    more = {k: options.pop(k) for k in ("threads", "chunk") if k in options}
    with contextlib.ExitStack() as stack:
        if more:
            stack.enter_context(patch.object(loader, "FileReader", partial(file_reader, **more)))
        if "lag" in options:
            stack.enter_context(patch.object(stream, "LAG", options.pop("lag")))
        if "copy_rows" in options:
            stack.enter_context(patch.object(stream, "COPY_ROWS", options.pop("copy_rows")))
        if "placement" in options:
            stack.enter_context(patch.object(planner, "spread", placed(options.pop("placement"))))
        if not options.pop("advice", True):
            stack.enter_context(patch.object(ring, "prepare_slot", lambda a, n, _: prepare(a, n, "cpu")))
        if options.pop("units", "layers") == "sublayers":
            stack.enter_context(patch.object(model_profile, "find_layers", sublayers))
        yield options


def measure(folder: str, tokens: int, options: dict[str, Any]) -> dict[str, Any]:
    """Seconds per token: median over ``tokens``, a prompt of 4 and one token of warm-up left out."""
    import mlx.core as mx

    from outcore import load_model
    from outcore.decode.one_text import generate_step

    warm = options.pop("warm", False)
    with engine(options) as rest:
        model, _ = load_model(folder, context=256, prompt=4, draft="none", **({"memory": "16GB"} | rest))
        session = model.outcore
        files = sorted(Path(folder).glob("*.safetensors"))
        if warm:
            for file in files:
                with file.open("rb", buffering=0) as f:
                    while f.read(1 << 26):
                        pass
        else:
            drop_page_cache(files)
        with session:
            stamps = []
            prompt = mx.array([3, 17, 99, 5], dtype=mx.int32)
            made = []
            for token, *_ in generate_step(
                prompt,
                model,
                max_tokens=tokens + 2,
                prefill_step_size=session.plan.prefill_step,
            ):
                made.append(int(token))
                stamps.append(time.perf_counter())
                if len(stamps) == 2:
                    session.metrics.reset()
            seconds = [b - a for a, b in pairwise(stamps[1:])]
            return {
                "s_per_token": statistics.median(seconds),
                "seconds": seconds,
                "tokens": made,
                "read_gbps": session.metrics.read_gbps,
                "stall_s": session.metrics.stall_s,
                "bytes_per_token": session.plan.bytes_per_token,
                "slots": session.plan.slots,
                "slot_bytes": session.plan.slot_bytes,
                "peak_memory_bytes": mx.get_peak_memory(),
                "io": session.io,
            }


def run(question: str, name: str, variants: Variants, judge: Callable[[Rows], str]) -> int:
    """Measure the variants of one experiment; the script's whole main."""
    if sys.argv[1:2] == ["--child"]:
        folder, tokens, options = json.loads(sys.argv[2])
        print(json.dumps(measure(folder, tokens, options)))
        return 0
    parser = argparse.ArgumentParser(description=question)
    parser.add_argument("model", type=Path, help="a model folder (see benchmarks/make_checkpoint.py)")
    parser.add_argument("--tokens", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).parents[1] / "results/experiments" / f"{name}.json"
    )
    args = parser.parse_args()
    samples: dict[str, list[dict[str, Any]]] = {v: [] for v in variants}
    for _ in range(args.repeats):
        for variant, options in variants.items():
            job = json.dumps([str(args.model), args.tokens, options])
            done = subprocess.run([sys.executable, sys.argv[0], "--child", job], capture_output=True, text=True)
            if done.returncode:
                print(f"{variant}: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
                continue
            samples[variant].append(json.loads(done.stdout.splitlines()[-1]))
            print(f"{variant}: {samples[variant][-1]['s_per_token']:.3f} s", file=sys.stderr)
    rows: Rows = {}
    for variant, got in samples.items():
        if got:
            seconds = [s for g in got for s in g["seconds"]]
            rows[variant] = got[0] | {
                "s_per_token": statistics.median(seconds),
                "least": min(seconds),
                "most": max(seconds),
            }
            rows[variant] |= {"read_gbps": statistics.median(g["read_gbps"] for g in got), "seconds": seconds}
    verdict = judge(rows)
    best = min((r["s_per_token"] for r in rows.values()), default=0.0)
    table = Table(
        "variant", "s/token", "least to most", "of the best", "GB/s while reading", "peak memory", title=question
    )
    for variant, r in rows.items():
        table.add_row(
            variant, f"{r['s_per_token']:.3f}", f"{r['least']:.3f} to {r['most']:.3f}",
            f"{r['s_per_token'] / best:.3f}",
            f"{r['read_gbps']:.2f}", f"{r['peak_memory_bytes'] / 1e6:.0f} MB",
        )  # fmt: skip
    Console().print(table)
    print(verdict)
    same = len({tuple(r["tokens"]) for r in rows.values()}) <= 1
    document = {
        "schema": SCHEMA, "question": question, "command": f"python benchmarks/experiments/{name}.py {args.model.name}",
        "machine": asdict(machine(args.model)), "model": args.model.name, "tokens": args.tokens,
        "repeats": args.repeats, "variants": variants, "rows": rows, "same_tokens": same, "verdict": verdict,
    }  # fmt: skip
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(document, indent=1) + os.linesep)
    return 0


def against(rows: Rows, base: str, margin: float = 0.03) -> str:
    """Every other variant's time over that of ``base``, and whether any is better by more than ``margin``."""
    if base not in rows:
        return f"{base} could not be measured"
    ratios = {v: r["s_per_token"] / rows[base]["s_per_token"] for v, r in rows.items() if v != base}
    text = ", ".join(f"{v} {ratio:.3f}" for v, ratio in ratios.items())
    better = [v for v, ratio in ratios.items() if ratio < 1 - margin]
    end = (
        f"better by more than {margin:.0%}: {', '.join(better)}"
        if better
        else f"none is better by more than {margin:.0%}"
    )
    return f"Time over {base}'s: {text}. {end}."
