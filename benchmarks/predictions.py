"""What a plan predicts against what is measured: seconds a token, time to the first token, and peak memory.

    python benchmarks/predictions.py MODEL[:DTYPE] ... --json FILE

Each model is calibrated (what is not known yet), then run at several budgets between the smallest that works and
everything resident. The prediction is written down before the run. The disk's rate is taken anew right before each,
from ranges that were not read lately, because a shared disk drifts within minutes; ``stored`` is the prediction from
the rate that calibration had found. Before its first point a model is read once: below a virtual disk the host may keep
what was read, and a run reads the same again and again. With ``--measure-now`` the layers are measured anew before each
point too, because what else runs on a shared machine slows computing down.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from outcore.bench.measure import measure
from outcore.bench.modes import Job
from outcore.calibration.calibrate import calibrated, disk_rate_now, measure_kinds, merge, store_calibration
from outcore.disk.layout import Extent
from outcore.disk.reader import FileReader
from outcore.errors import BudgetError
from outcore.loading.preparation import Preparation, prepare
from outcore.model.find_model import resolve_model
from outcore.planning.planner import resident_budget
from outcore.planning.prediction import predict
from result_file import write_result

SHARES = "0,0.3,0.6,0.85"
"""Budgets: shares of the way from a little above the smallest to everything resident."""


@dataclass
class Point:
    """One budget. Seconds and bytes; ``stored_s`` with the disk's rate as calibration had found it."""

    model: str
    dtype: str | None
    budget: int
    resident: int
    streamed: int
    slots: int
    parts: int
    read_gbps: float
    predicted_s: float
    stored_s: float
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


def options(job: Job) -> dict[str, Any]:
    return {
        "memory": job.memory,
        "context": job.context,
        "prompt": job.prompt_tokens,
        "dtype": job.dtype,
        "io": job.io,
        "cpu_streams": job.cpu_streams,
    }


def point(job: Job, name: str, measure_now: bool) -> Point:
    """Predict, then measure; in a process of its own."""
    prepared = prepare(job.folder, **options(job))
    if measure_now:
        layers = measure_kinds(prepared, budget_s=12.0)
        now = merge(prepared.calibration, layers.kinds, layers.conditions, layers.parts)
        store_calibration(Path(job.folder), prepared.cpu_streams, now)
        prepared = prepare(job.folder, **options(job))
    calibration = prepared.calibration
    files = weight_files(prepared)
    now = replace(calibration, read_gbps=disk_rate_now(files, calibration, seconds=2.0))
    plan, size = prepared.plan, prepared.profile.size
    predicted = predict(size, plan, now)
    del prepared
    row = measure(job)
    assert row.s_per_token is not None and row.ttft_s is not None and row.peak_memory_bytes is not None
    return Point(
        model=name,
        dtype=job.dtype,
        budget=plan.budget_bytes,
        resident=len(plan.resident),
        streamed=len(plan.streamed),
        slots=plan.slots,
        parts=len(plan.parts),
        read_gbps=now.read_gbps,
        predicted_s=predicted.token_s,
        stored_s=plan.token_s,
        measured_s=row.s_per_token.median,
        predicted_ttft_s=predicted.ttft_s,
        measured_ttft_s=row.ttft_s.median,
        planned_peak=plan.peak_bytes,
        measured_peak=row.peak_memory_bytes,
        stall_share=row.stall_share,
    )


def jobs_of(folder: Path, dtype: str | None, args: argparse.Namespace) -> list[Job]:
    """One for each budget."""
    job = Job(
        mode="outcore",
        folder=str(folder),
        label="",
        tokens=args.tokens,
        prompt_tokens=args.prompt_tokens,
        repeats=args.repeats,
        warmup=1,
        batch=1,
        cache="cold",
        context=args.prompt_tokens + args.tokens + 1,
        vocabulary=128,
        dtype=dtype,
        io=args.io,
    )
    try:
        prepared = prepare(folder, **(options(job) | {"memory": "1MB"}))
        least = prepared.plan.smallest_budget_bytes
    except BudgetError as e:
        assert e.smallest is not None
        least = e.smallest
        prepared = prepare(folder, **(options(job) | {"memory": least}))
    calibrated(prepared, folder, prepared.cpu_streams, note=lambda line: print(line, file=sys.stderr))
    for file in weight_files(prepared):
        read_once(file)
    most = resident_budget(prepared.profile.size)
    low = min(int(1.2 * least), most)
    shares = [float(share) for share in args.shares.split(",")]
    return [replace(job, memory=f"{low + int(share * (most - low))}B") for share in shares]


def weight_files(prepared: Preparation) -> list[Path]:
    return sorted({e.file for u in prepared.profile.units if u is not None for e in u.extents})


def read_once(file: Path) -> None:
    """Read a file around this machine's page cache, where that can be done."""
    size = file.stat().st_size
    target = memoryview(bytearray(min(size, 64 << 20)))
    reader = FileReader([file])
    for offset in range(0, size, len(target)):
        n = min(len(target), size - offset)
        reader.submit(file.name, [Extent(file, offset, n, 0, in_place=False)], target).wait()
    reader.close()


def in_a_child(job: Job, name: str, measure_now: bool) -> Point | None:
    """A point, measured in a process of its own; None, and why on standard error, where it failed."""
    command = [sys.executable, __file__, "--child", json.dumps(asdict(job)), name]
    command += ["--measure-now"] if measure_now else []
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print(f"{name}, {job.memory}: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
        return None
    return Point(**json.loads(done.stdout.splitlines()[-1]))


def summary(points: list[Point]) -> dict[str, Any]:
    """Median and worst of the absolute errors, and how many peaks were higher than planned."""
    found: dict[str, Any] = {"points": len(points)}
    for name in ("error", "ttft_error", "peak_error"):
        errors = [abs(getattr(p, name)) for p in points]
        found[name] = {"median": statistics.median(errors), "worst": max(errors)}
    found["stored_error"] = {
        "median": statistics.median(abs(p.stored_s / p.measured_s - 1) for p in points),
        "worst": max(abs(p.stored_s / p.measured_s - 1) for p in points),
    }
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


def main() -> int:
    parser = argparse.ArgumentParser(description="Predictions of plans against measurements.")
    parser.add_argument("models", nargs="*", metavar="MODEL[:DTYPE]")
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--measure-now", action="store_true", help="measure layers right before each run")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--shares", default=SHARES, help="budgets on the way to everything resident (%(default)s)")
    parser.add_argument("--io", default="auto")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--child", nargs=2, metavar=("JOB", "NAME"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(asdict(point(Job(**json.loads(args.child[0])), args.child[1], args.measure_now))))
        return 0
    points: list[Point] = []
    for given in args.models:
        model, _, dtype = given.partition(":")
        folder = resolve_model(model)
        # All budgets in turn, and again: drift of the disk meets each of them.
        for job in jobs_of(folder, dtype or None, args) * args.rounds:
            found = in_a_child(job, folder.name, args.measure_now)
            if found is not None:
                points.append(found)
                with contextlib.redirect_stdout(sys.stderr):
                    show(points[-1:])
            if points:
                write_result(
                    args.json,
                    "predictions",
                    folder,
                    summary=summary(points),
                    points=[asdict(p) | {"error": p.error, "ttft_error": p.ttft_error} for p in points],
                )
    show(points)
    print(json.dumps(summary(points), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
