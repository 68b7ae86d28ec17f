"""What a plan predicts against what is measured: seconds a token, time to the first token, and peak memory.

    python benchmarks/predictions.py MODEL[:DTYPE[:DISK]] ... --json FILE

Each model is calibrated afresh, in a cache folder of its own, and then run at several budgets between a little
above the smallest that works and everything resident; with DISK (such as 400MB) behind a disk that gives so many bytes
a second (a control group of version 1, `blkio`, which takes root). The prediction is written down before the run, as
``outcore plan`` would make it. Before its first point a model is read once: below a virtual disk the host may keep what
was read, and a run reads the same again and again.

Three models at five budgets, in about eight minutes where a run takes a second a token or less:

    python benchmarks/predictions.py py-qwen35-28m:float32:100MB llama-1gb py-llama-3m:float32 --json FILE
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from outcore.checkpoint.find_model import resolve_model
from outcore.checks import parse_size
from outcore.cli.plan import ASSUMED_SPREAD, SPREAD
from outcore.decode import loader
from outcore.decode.preparation import Preparation, prepare
from outcore.disk.layout import Extent
from outcore.disk.reader import FileReader
from outcore.errors import BudgetError
from outcore.machine.allocator import clear_cache
from outcore.plan.planner import resident_budget
from outcore_bench.jobs import BenchJob, RunSettings
from outcore_bench.measure import measure
from outcore_calibrate.calibration import calibrated
from result_file import write_result
from slow_disk import slow_disk

SHARES = "0,0.25,0.5,0.75,0.95"
"""Budgets: shares of the way from a little above the smallest to everything resident."""


@dataclass
class Point:
    """One budget. Seconds and bytes; ``low_s``, ``high_s``: the range that was predicted."""

    model: str
    dtype: str | None
    budget: int
    resident: int
    streamed: int
    slots: int
    parts: int
    read_gbps: float
    predicted_s: float
    low_s: float
    high_s: float
    measured_s: float
    predicted_ttft_s: float
    measured_ttft_s: float
    planned_peak: int
    measured_peak: int
    stall_share: float | None

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1

    @property
    def ttft_error(self) -> float:
        return self.predicted_ttft_s / self.measured_ttft_s - 1

    @property
    def peak_error(self) -> float:
        return self.planned_peak / self.measured_peak - 1


def options(job: BenchJob) -> dict[str, Any]:
    return {
        "memory": job.memory,
        "context": job.context,
        "prompt": job.run.prompt_tokens,
        "dtype": job.run.dtype,
        "io": job.io,
        "cpu_streams": job.run.cpu_streams,
    }


def point(job: BenchJob, name: str) -> Point:
    """Predict, then measure; in a process of its own."""
    prepared = prepare(job.folder, **options(job))
    plan, read_gbps = prepared.plan, prepared.calibration.read_gbps
    spread = SPREAD if plan.calibrated else ASSUMED_SPREAD
    low_s, high_s = plan.token_s / spread, plan.token_s * spread
    del prepared
    clear_cache()
    row = measure(job)
    token, first, peak = row.speed.s_per_token, row.speed.ttft_s, row.use.peak_memory_bytes
    assert token is not None and first is not None and peak is not None
    return Point(
        model=name,
        dtype=job.run.dtype,
        budget=plan.budget_bytes,
        resident=len(plan.resident),
        streamed=len(plan.streamed),
        slots=plan.slots,
        parts=len(plan.parts),
        read_gbps=read_gbps,
        predicted_s=plan.token_s,
        low_s=low_s,
        high_s=high_s,
        measured_s=token.median,
        predicted_ttft_s=plan.ttft_s,
        measured_ttft_s=first.median,
        planned_peak=plan.peak_bytes,
        measured_peak=peak,
        stall_share=row.reading.stall_share,
    )


def jobs_of(folder: Path, dtype: str | None, args: argparse.Namespace) -> list[BenchJob]:
    """One for each budget."""
    run = RunSettings(max_tokens=args.tokens, prompt_tokens=args.prompt_tokens, repeats=args.repeats, dtype=dtype)
    job = BenchJob("outcore", str(folder), "", run, run.context, 128, io=args.io)
    try:
        prepared = prepare(folder, **(options(job) | {"memory": "1MB"}))
        least = prepared.plan.smallest_budget_bytes
    except BudgetError as e:
        assert e.smallest is not None
        least = e.smallest
        prepared = prepare(folder, **(options(job) | {"memory": least}))
    # What mlx-lm changes of a model is packed when it is first loaded.
    model, _ = loader.load_model(folder, **(options(job) | {"memory": least}))
    model.outcore.close()
    calibrated(prepared.profile, folder, prepared.cpu_streams, note=lambda line: print(line, file=sys.stderr))
    for file in weight_files(prepared):
        read_once(file)
    most = resident_budget(prepared.profile.size)
    low = min(int(1.2 * least), most)
    shares = [float(share) for share in args.shares.split(",")]
    return [replace(job, memory=f"{low + int(share * (most - low))}B") for share in shares]


def weight_files(prepared: Preparation) -> list[Path]:
    return sorted({e.file for p in prepared.profile.parts if p.unit is not None for e in p.unit.extents})


def read_once(file: Path) -> None:
    """Read a file around this machine's page cache, where that can be done."""
    size = file.stat().st_size
    target = memoryview(bytearray(min(size, 64 << 20)))
    reader = FileReader([file])
    for offset in range(0, size, len(target)):
        n = min(len(target), size - offset)
        reader.submit(file.name, [Extent(file, offset, n, 0, in_place=False)], target).wait()
    reader.close()


def in_a_child(group: Path | None, environment: Mapping[str, str], *words: str) -> Any:
    """What a process of its own found, in that group; None, and why on standard error, where it failed."""
    command = [sys.executable, __file__, *words]
    if group is not None:
        command = ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh", *command]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        print(f"{' '.join(words)[:200]}: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
        return None
    return json.loads(done.stdout.splitlines()[-1])


def summary(points: list[Point]) -> dict[str, Any]:
    """Median and worst of the absolute errors, and how many peaks were higher than planned."""
    found: dict[str, Any] = {"points": len(points)}
    for name in ("error", "ttft_error", "peak_error"):
        errors = [abs(getattr(p, name)) for p in points]
        found[name] = {"median": statistics.median(errors), "worst": max(errors)}
    found["in_range"] = sum(p.low_s <= p.measured_s <= p.high_s for p in points)
    found["slowest_step"] = {name: slowest_step([p for p in points if p.model == name]) for name in models(points)}
    found["peaks_above_plan"] = sum(p.measured_peak > p.planned_peak for p in points)
    return found


def models(points: list[Point]) -> list[str]:
    return list(dict.fromkeys(p.model for p in points))


def slowest_step(points: list[Point]) -> float | None:
    """The least speed of a budget over that of the next smaller one, medians of all rounds; None for one budget."""
    times: dict[int, list[float]] = {}
    for p in points:
        times.setdefault(p.budget, []).append(p.measured_s)
    medians = [statistics.median(times[budget]) for budget in sorted(times)]
    return min((a / b for a, b in pairwise(medians)), default=None)


def show(points: list[Point]) -> None:
    table = Table(
        "model", "memory", "resident", "slots", "parts", "disk", "s/token", "predicted", "", "TTFT", "", "peak"
    )
    for p in points:
        table.add_row(
            f"{p.model}{f' {p.dtype}' if p.dtype else ''}",
            f"{p.budget / 1e9:.2f} GB",
            f"{p.resident}+{p.streamed}",
            str(p.slots),
            str(p.parts),
            f"{p.read_gbps:.2f}",
            f"{p.measured_s:.3f}",
            f"{p.predicted_s:.3f}",
            f"{100 * p.error:+.1f} %",
            f"{p.measured_ttft_s:.2f}",
            f"{100 * p.ttft_error:+.1f} %",
            f"{100 * p.peak_error:+.1f} %",
        )
    Console(width=150).print(table)


def setup_arg_parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    parser = argparse.ArgumentParser(description="Predictions of plans against measurements.")
    parser.add_argument("models", nargs="*", metavar="MODEL[:DTYPE[:DISK]]")
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--shares", default=SHARES, help="budgets on the way to everything resident (%(default)s)")
    parser.add_argument("--io", default="auto")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--child", nargs=3, metavar=("KIND", "WHAT", "NAME"), help=argparse.SUPPRESS)
    return parser


def child(args: argparse.Namespace) -> None:
    """Print what one process of its own is for."""
    kind, what, name = args.child
    if kind == "jobs":
        found: Any = [asdict(job) for job in jobs_of(Path(what), name or None, args)]
    else:
        found = asdict(point(BenchJob.of(json.loads(what)), name))
    print(json.dumps(found))


def main() -> int:
    args = setup_arg_parser().parse_args()
    if args.child:
        child(args)
        return 0
    flags = ["--tokens", str(args.tokens), "--prompt-tokens", str(args.prompt_tokens), "--repeats", str(args.repeats)]
    flags += ["--shares", args.shares, "--io", args.io]
    points: list[Point] = []
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as cache:
        for n, given in enumerate(args.models):
            # One's disk may be held back.
            environment = os.environ | {"OUTCORE_CACHE": f"{cache}/{n}"}
            model, _, rest = given.partition(":")
            dtype, _, disk = rest.partition(":")
            folder = resolve_model(model)
            with slow_disk(folder, parse_size(disk, flag="DISK") if disk else None) as group:
                jobs = in_a_child(group, environment, "--child", "jobs", str(folder), dtype, *flags) or []
                # All budgets in turn, and again: drift of the disk meets each of them.
                for job in jobs * args.rounds:
                    found = in_a_child(group, environment, "--child", "point", json.dumps(job), folder.name, *flags)
                    if found is None:
                        continue
                    points.append(Point(**found))
                    with contextlib.redirect_stdout(sys.stderr):
                        show(points[-1:])
                    write_result(
                        args.json,
                        "predictions",
                        folder,
                        seconds=round(time.monotonic() - began),
                        summary=summary(points),
                        points=[asdict(p) | {"error": p.error, "ttft_error": p.ttft_error} for p in points],
                    )
    if not points:
        return 1
    show(points)
    print(json.dumps(summary(points), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
