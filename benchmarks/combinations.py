"""Features that meet: every pair and triple of them gives mlx-lm's tokens, or is refused by name.

    python benchmarks/combinations.py --case "kind=dense weights=4bit face=server"
    python benchmarks/combinations.py --pairs | --triples | --gpu [--jobs 2] [--log FILE] [--json FILE]

Cases are drawn of what ``tests/support/combined_cases.py`` lists, but for those of docs/combinations.toml. Each is run
with a tiny model, one after the other in ``--jobs`` processes, and its result is a line of ``--log``: with that, a run
that was cut off goes on. A case that fails is said at once, as the line that runs it again.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import logging
import multiprocessing
import os
import queue
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import mlx.core as mx

import _support  # noqa: F401
from combined_cases import Case, Pair, drawn, on_gpu, parsed, possible
from combined_models import Shelf
from combined_runs import DIFFERENT, EQUAL, FAILED, NO_REFERENCE, REFUSED, ROUNDED, Result, run
from rank_processes import WaitingRanks
from result_file import write_result

CASE_S = 300.0
"""Seconds that a case may take: on CUDA the first ones compile their kernels."""


def worker(root: Path, on_gpu: bool, lines: Connection) -> None:
    """Runs the cases that come."""
    prepare(on_gpu)
    ranks = WaitingRanks(root / f"ranks-{os.getpid()}")
    try:
        while (line := lines.recv()) is not None:
            faulthandler.dump_traceback_later(CASE_S, exit=True)
            lines.send(one(parsed(line), root, ranks))
            faulthandler.cancel_dump_traceback_later()
    finally:
        ranks.close()


def prepare(on_gpu: bool) -> None:
    if not on_gpu:
        mx.set_default_device(mx.cpu)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    os.environ |= {"OUTCORE_CONFIG": os.devnull, "OUTCORE_MONITOR": "off"}


def one(case: Case, root: Path, ranks: WaitingRanks) -> Result:
    """A case, with a cache folder of its own."""
    with tempfile.TemporaryDirectory(dir=root) as cache:
        os.environ["OUTCORE_CACHE"] = cache
        return run(case, Shelf(root / "models"), ranks.two() if case.face == "ranks" else None)


def run_all(cases: list[Case], root: Path, jobs: int, on_gpu: bool) -> Iterator[Result]:
    """Results as they come, of so many processes; one that ends fails its case, and another takes its place."""
    context = multiprocessing.get_context("spawn")
    todo, results = queue.SimpleQueue[Case](), queue.SimpleQueue[Result]()
    for case in cases:
        todo.put(case)

    def feed() -> None:
        process: Any = None
        while True:
            try:
                case = todo.get_nowait()
            except queue.Empty:
                break
            if process is None:
                mine, its = context.Pipe()
                process = context.Process(target=worker, args=(root, on_gpu, its))
                process.start()
                its.close()
            try:
                mine.send(str(case))
                results.put(mine.recv())
            except (EOFError, OSError):
                process.join()
                results.put(Result(str(case), FAILED, f"its process ended with status {process.exitcode}"))
                process = None
        if process is not None:
            mine.send(None)
            process.join()

    feeders = [threading.Thread(target=feed, daemon=True) for _ in range(jobs)]
    for feeder in feeders:
        feeder.start()
    for _ in cases:
        yield results.get()
    for feeder in feeders:
        feeder.join()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--case", action="append", type=parsed, help="this one; what is not said is the simplest")
    which.add_argument("--pairs", action="store_true")
    which.add_argument("--triples", action="store_true")
    which.add_argument("--gpu", action="store_true", help="what only a GPU computes, with every other value")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--log", type=Path, help="where results are kept, and taken up")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    n = 2 if args.pairs else 3
    never: set[Pair] = set()
    cases: list[Case] = args.case
    if args.gpu:
        cases = on_gpu()
    elif cases is None:
        cases, never = drawn(n)
    done: list[Result] = []
    if args.log is not None and args.log.exists():
        done = [Result(**json.loads(line)) for line in args.log.read_text().splitlines()]
    had = {r.case for r in done}
    left = [case for case in cases if str(case) not in had]
    print(f"{len(cases)} cases, {len(left)} to run", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for result in run_all(left, Path(folder), min(args.jobs, max(1, len(left))), args.gpu):
            done.append(result)
            if args.log is not None:
                with args.log.open("a") as log:
                    log.write(json.dumps(asdict(result)) + "\n")
            if result.end != EQUAL or args.case:
                print(f"{result.end} after {result.seconds} s: --case '{result.case}': {result.why}", flush=True)
    ends = Counter(r.end for r in done)
    print(dict(ends), f"{sum(r.seconds for r in done):.0f} s")
    met = {m for r in done if r.end == EQUAL for m in parsed(r.case).meetings(n) if not any(k in r.idle for k, _ in m)}
    write_result(
        args.json,
        "combinations",
        Path.cwd(),
        met=n,
        cases=len(done),
        ends=dict(ends),
        meetings=len(met),
        never=[dict(m) for m in sorted(never)],
        unmet=[dict(m) for m in sorted(possible(n) - never - met)] if args.case is None and not args.gpu else [],
        differences=[asdict(r) for r in done if r.end in (DIFFERENT, FAILED)],
        refused=dict(Counter(r.why for r in done if r.end == REFUSED)),
        rounded=[asdict(r) for r in done if r.end in (ROUNDED, NO_REFERENCE)],
    )
    return int(any(r.end in (DIFFERENT, FAILED) for r in done))


if __name__ == "__main__":
    sys.exit(main())
