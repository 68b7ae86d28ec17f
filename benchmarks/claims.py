"""Measures what is claimed of Outcore's speed and memory, in one run: each beside its ceiling and the plain way.

    python benchmarks/claims.py models/llama-4gb --tokens 8 --json claims.json

Every measurement runs in a process of its own, so that its memory numbers are its own, and where a limit is promised,
inside a control group with that limit, page cache counted. The model's files are dropped from the page cache before
each (posix_fadvise). A disk's rate drifts, so it is measured before and after each streamed run, and that run's
ceiling is the mean of the two.

What is measured
    disk       bytes per second of `FileReader` into two slots, a reader that does nothing else: median of 3 reads of
               all weight files, with 4 and with 8 threads, the better one counts
    resident   seconds per token with all weights in memory: mlx-lm, and Outcore with one CPU stream and with all
               cores. Two models share a process and take turns token by token; ratios are medians over pairs.
    limited    Outcore under a limit of 40 % of the checkpoint's size, its budget chosen by itself; and once more with
               `--memory` 250 MB below the limit (`limited_told`).
    streamed   Outcore with nothing resident, no limit: speed, memory, sweeps.
    small      Outcore with nothing resident under a limit of 800 MB.
    sweeps     a prompt of 64 tokens (try --prompt-tokens 300 where compute is fast), nothing resident.
    plain      the plain way (outcore_bench.measure), without a limit and under the 40 % one.

A token's time is the time between two tokens handed out: median over `--tokens` tokens, the prompt and one token of
warm-up left out. Disk time is the bytes that were read per token over the disk's rate; compute time is `resident` with
all cores, measured at the beginning and at the end of the run, the faster of which counts: other work on the machine
can only slow it down, and must not lift the ceiling. The ceiling is the greater of disk time and compute time. Where
the two compute times are more than 10 % apart, or other programs used more than 10 % of the cores right before a
measurement, the table says that the machine was busy: no number of such a run is worth quoting.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import psutil  # type: ignore[import-untyped]
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from rich.console import Console

import benchmark
import outcore
from benchmark import SAME_OUTCORE, Failed, Result
from cgroup import Cgroup, CgroupError
from judge import judge, show
from outcore.checkpoint.checkpoint import open_checkpoint
from outcore.errors import OutcoreError
from outcore.machine.memory import peak_rss, rss
from outcore.sizes import format_size
from outcore_bench.disk import disk_rate, drop_page_cache
from outcore_bench.measure import NaiveStreaming, prompt_ids

LIMIT = 0.4  # of the checkpoint's size
SMALL_LIMIT = 800_000_000
TOLD_BELOW = 250_000_000  # for Python, MLX's libraries and a tokenizer
GROUPS = ("resident", "limited", "streamed", "small", "sweeps", "plain")

# ---- measurements, each in a process of its own ------------------------------------------------------------------


def disk(folder: str, **options: Any) -> Result:
    """GB/s of parallel reads of all weight files; ``options`` go to ``disk_rate``."""
    return asdict(disk_rate(open_checkpoint(Path(folder)).files, **options))


def resident(folder: str, tokens: int, prompt_tokens: int, cpu_streams: int | None) -> Result:
    """mlx-lm and Outcore with everything resident, token by token in turn.

    Raises:
        OutcoreError: there is no memory for two models.
    """
    plain = mlx_lm.load(folder)[0]
    ours = outcore.load(folder, cpu_streams=cpu_streams, draft="none")[0]
    session = ours.outcore
    if session.streaming is not None:
        raise OutcoreError("two models do not fit into memory here; everything resident cannot be measured")
    runs = [_Run(plain, prompt_ids(prompt_tokens)), _Run(ours, prompt_ids(prompt_tokens))]
    for i in range(tokens + 1):
        for run in runs if i % 2 else runs[::-1]:
            run.step()
    theirs, own = (run.seconds[1:] for run in runs)
    return {
        "plain_s": statistics.median(theirs),
        "ours_s": statistics.median(own),
        "speed_ratio": statistics.median(a / b for a, b in zip(theirs, own, strict=True)),
        "plain_seconds": theirs,
        "ours_seconds": own,
        "cpu_streams": session.cpu_streams,
        "tokens": runs[0].tokens,
        "digests": runs[0].digests,
        "same": runs[0].digests == runs[1].digests,
    }


class _Run:
    """A resident model, its cache, and a loop that computes one token when asked, without looking ahead."""

    def __init__(self, model: Any, ids: list[int]) -> None:
        self.model = model
        self.cache = make_prompt_cache(model)
        self.tokens: list[int] = []
        self.digests: list[str] = []
        self.seconds: list[float] = []
        # mlx-lm's cut of a prompt: all but the last token, and the last.
        model(mx.array(ids[:-1])[None], cache=self.cache)
        mx.eval([c.state for c in self.cache])
        self._token = ids[-1]
        self.step()
        self.seconds.clear()

    def step(self) -> None:
        began = time.perf_counter()
        logits = self.model(mx.array([[self._token]]), cache=self.cache)[:, -1, :]
        logprobs = logits - mx.logsumexp(logits, keepdims=True)
        token = mx.argmax(logprobs, axis=-1)
        mx.eval(token, logprobs)
        self._token = int(token.item())  # type: ignore[arg-type]
        self.seconds.append(time.perf_counter() - began)
        self.tokens.append(self._token)
        self.digests.append(digest(logprobs))


def ours(folder: str, tokens: int, prompt_tokens: int, **options: Any) -> Result:
    """Outcore's own loop; ``options`` go to ``outcore.load``."""
    baseline = rss()
    model, tokenizer = outcore.load(folder, draft="none", **options)
    session = model.outcore
    loaded = peak_rss()
    tokenizer.eos_token_ids = set()  # random weights may end a text anywhere
    plan, metrics = session.plan, session.metrics
    result: Result = {"tokens": [], "digests": []}
    stamps, sweeps, read = [time.perf_counter()], [], []
    for r in outcore.stream_generate(model, tokenizer, prompt_ids(prompt_tokens), max_tokens=tokens + 2):
        stamps.append(time.perf_counter())
        sweeps.append(metrics.sweeps)
        read.append(metrics.bytes_read)
        result["tokens"].append(r.token)
        result["digests"].append(digest(r.logprobs))
    result |= seconds(stamps)
    result |= {
        "prompt_tokens": prompt_tokens,
        "sweeps_after_each_token": sweeps,
        "sweeps": metrics.sweeps,
        "bytes_per_token": (read[-1] - read[1]) / tokens,
        "planned_bytes_per_token": plan.bytes_per_token,
        "stall_s": metrics.stall_s,
        "read_gbps": metrics.read_gbps,
        "misses": metrics.misses,
        "io": session.io,
        "cpu_streams": session.cpu_streams,
        "budget_bytes": plan.budget_bytes,
        "planned_peak_bytes": plan.peak_bytes,
        "context": plan.context,
        "resident_units": len(plan.resident),
        "streamed_units": len(plan.streamed),
        "slots": plan.slots,
        "slot_bytes": plan.slot_bytes,
        "prefill_step": plan.prefill_step,
        "cache_bytes": plan.cache_bytes,
        "activation_bytes": plan.activation_bytes,
        "non_layer_bytes": session.size.non_layer,
        "peak_memory_bytes": mx.get_peak_memory(),
        "baseline_rss_bytes": baseline,
        "loaded_peak_rss_bytes": loaded,
        "peak_rss_bytes": peak_rss(),
    }
    session.close()
    return result


def plain(folder: str, tokens: int, prompt_tokens: int) -> Result:
    """The plain way in mlx-lm's loop."""
    result: Result = {"tokens": [], "digests": []}
    stamps = [time.perf_counter()]
    with closing(NaiveStreaming(Path(folder))) as plain:
        stamps[0] = time.perf_counter()
        for token, logprobs in generate_step(mx.array(prompt_ids(prompt_tokens)), plain.model, max_tokens=tokens + 2):
            stamps.append(time.perf_counter())
            result["tokens"].append(int(token))
            result["digests"].append(digest(logprobs))
    result |= seconds(stamps)
    return result | {"peak_memory_bytes": mx.get_peak_memory(), "peak_rss_bytes": peak_rss()}


MEASUREMENTS: dict[str, Callable[..., Result]] = {"disk": disk, "resident": resident, "ours": ours, "plain": plain}


def seconds(stamps: Sequence[float]) -> Result:
    """Time to the first token, and per token after the warm-up one."""
    per_token = [b - a for a, b in itertools.pairwise(stamps[2:])]
    return {"ttft_s": stamps[1] - stamps[0], "s_per_token": statistics.median(per_token), "seconds": per_token}


def digest(logprobs: mx.array) -> str:
    """Of all bits of a token's log-probabilities."""
    return hashlib.sha256(np.array(logprobs.reshape(-1).astype(mx.float32)).tobytes()).hexdigest()[:16]


# ---- running them -----------------------------------------------------------------------------------------------


class Bench(benchmark.Subject):
    """Runs measurements on one model, in fresh processes, and keeps what they gave.

    Attributes:
        results: by name; ``disk`` is a list, in the order of the run. A failed one is ``{"failed": why}``.
    """

    def __init__(self, folder: Path, log: Console) -> None:
        super().__init__(folder, log)
        self.results: Result = {"disk": []}

    def disk(self) -> float:
        """Measure the disk; GB/s."""
        self.results["disk"].append(self._fresh("disk", {}, None))
        return float(self.results["disk"][-1]["best_gbps"])

    def measure(
        self, name: str, kind: str, options: Result, limit: int | None = None, *, attempts: Iterable[Result] = ({},)
    ) -> None:
        """Run one measurement and keep its result under ``name``.

        Args:
            limit: bytes of the control group that it runs in.
            attempts: further options to try, one after the other, until one of them gives a result.
        """
        tried = []
        result: Result = {}
        for more in attempts:
            try:
                result = self._fresh(kind, options | more, limit)
                tried.append({"options": more, "outcome": "ok"})
                break
            except CgroupError as e:
                result = {"skipped": str(e)}
            except Failed as e:
                result = {"failed": str(e)}
                tried.append({"options": more, "outcome": str(e)})
                self.log.print(f"  {name}: {e}", highlight=False)
        self.results[name] = result | {"limit_bytes": limit, "attempts": tried}

    def bracketed(self, name: str, kind: str, options: Result, limit: int | None = None, **more: Any) -> None:
        """``measure``, with the disk's rate before and after it."""
        before = self.disk()
        self.measure(name, kind, options, limit, **more)
        self.results[name]["disk_gbps"] = [before, self.disk()]

    def _fresh(self, kind: str, options: Result, limit: int | None) -> Result:
        drop_page_cache(self.files)
        command = benchmark.child_command(__file__, kind, {"folder": str(self.folder), **options})
        shown = " ".join(f"{k}={v}" for k, v in options.items())
        self.log.print(f"{kind} {shown}" + (f" under {format_size(limit)}" if limit else ""), highlight=False)
        others = psutil.cpu_percent(interval=0.5)  # nothing of ours runs now
        with ExitStack() as stack:
            group = stack.enter_context(Cgroup(f"outcore-claims-{os.getpid()}", limit)) if limit else None
            done = subprocess.run(
                group.wrap(command) if group else command, capture_output=True, text=True, env=os.environ | SAME_OUTCORE
            )
            if done.returncode:
                lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
                raise Failed("killed for memory" if group and group.kills else lines[-1])
            result: Result = json.loads(done.stdout.splitlines()[-1]) | {"others_cpu_percent": others}
            if group:
                result["cgroup_peak_bytes"] = group.peak_bytes
        return result


def run(bench: Bench, only: Sequence[str], tokens: int, prompt_tokens: int) -> None:
    """All measurements asked for, in an order that puts what is compared close together."""
    options: Result = {"tokens": tokens, "prompt_tokens": 3}
    nothing = options | {"resident": 0}
    few = options | {"tokens": min(tokens, 3)}
    limit = int(LIMIT * bench.nbytes)
    if "resident" in only:
        bench.measure("resident_one", "resident", options | {"cpu_streams": 1})
        bench.measure("resident_all", "resident", options | {"cpu_streams": None})
    if "limited" in only:
        bench.bracketed("limited", "ours", options, limit)
        bench.bracketed("limited_told", "ours", options | {"memory": max(1, limit - TOLD_BELOW)}, limit)
    if "plain" in only:
        bench.measure("plain_limited", "plain", few, limit)
    if "streamed" in only:
        bench.bracketed("streamed", "ours", nothing)
    if "plain" in only:
        bench.measure("plain", "plain", few)
    if "small" in only:
        forced = {"context": 256, "memory": SMALL_LIMIT - 220_000_000}
        bench.bracketed("small", "ours", nothing, SMALL_LIMIT, attempts=({}, {"context": 256}, forced))
    if "sweeps" in only:
        bench.measure("sweeps", "ours", nothing | {"tokens": 1, "prompt_tokens": prompt_tokens})
    if "resident" in only:
        bench.measure("resident_all_again", "resident", few | {"cpu_streams": None})
    if not bench.results["disk"]:
        bench.disk()


# ---- command ----------------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["--child"]:
        return benchmark.child(MEASUREMENTS, argv)
    parser = benchmark.arg_parser("Measure what is claimed of Outcore's speed and memory", GROUPS)
    parser.add_argument("--tokens", type=int, default=8, help="tokens timed in each run (default: %(default)s)")
    parser.add_argument(
        "--prompt-tokens", type=int, default=64, help="prompt of the sweeps measurement (default: %(default)s)"
    )
    args = parser.parse_args(argv)
    only = benchmark.chosen(parser, args, GROUPS)
    if args.tokens < 1 or args.prompt_tokens < 2:
        parser.error("at least 1 token and a prompt of 2")

    def measure(log: Console) -> Result:
        bench = Bench(args.model, log)
        run(bench, only, args.tokens, args.prompt_tokens)
        claims = [asdict(claim) for claim in judge(bench.results)]
        return {"model": bench.record, "measurements": bench.results, "claims": claims}

    def table(document: Result, console: Console) -> None:
        show(document, judge(document["measurements"]), console)

    return benchmark.run("claims", argv, args, measure, table)


if __name__ == "__main__":
    sys.exit(main())
