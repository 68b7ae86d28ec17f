"""Files and words that went wrong, by the ways that a user's come in: nothing but Outcore's own errors may come out.

    python benchmarks/fuzz.py [--minutes 30] [--target NAME ...] [--json FILE]

Each target (``fuzz_targets``) runs in a process of its own, with a limit on its memory, and is given examples with
random seeds until its share of the time is over. A defect is an error that is not Outcore's, an example that takes
longer than ``--seconds``, or memory beyond ``--memory``; of equal ones the first is kept, made as small as hypothesis
can. What the run of 30 minutes found is cured; `benchmarks/results/fuzz-cpu.json` keeps both.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import multiprocessing
import os
import resource
import secrets
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
from hypothesis import HealthCheck, Phase, given, seed, settings

import fuzz_targets
from fuzz_targets import FuzzTarget
from outcore.checks import parse_size
from outcore.machine.memory import fields_of, peak_rss
from outcore_bench.disk import machine

ROUND = 200
"""Examples that share a seed."""

Record = dict[str, Any]


class Counts:
    """What has happened with a target's examples."""

    def __init__(self) -> None:
        self.examples = self.refused = 0

    def add(self, refused: bool) -> None:
        """One more, and whether it was refused."""
        self.examples += 1
        self.refused += refused


def search(
    target: FuzzTarget, examples: int, counts: Counts, begin: Callable[[Any], object], number: int | None
) -> None:
    """Give a target so many examples; raises what it should not have.

    Args:
        begin: called with each example before it runs.
        number: seed; None: the same examples each time.
    """

    def run(example: Any) -> None:
        begin(example)
        counts.add(fuzz_targets.refused(target.run, example))

    wanted = settings(
        max_examples=examples,
        derandomize=number is None,
        database=None,
        deadline=None,
        print_blob=False,
        report_multiple_bugs=False,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    searched = given(target.examples)(wanted(run))
    (seed(number)(searched) if number is not None else searched)()


def _child(name: str, folder: Path, until: float, limit: float, memory: int, pipe: Connection) -> None:
    """Run one target until then, and tell what is begun and what was found."""
    target = fuzz_targets.targets(fuzz_targets.fresh(folder))[name]()
    before = fields_of(Path("/proc/self/status")).get("VmSize", 0) * 1024
    if before:
        # Threads reserve far more than they use.
        resource.setrlimit(resource.RLIMIT_AS, (before + 4 * memory, resource.RLIM_INFINITY))
    counts, held = Counts(), peak_rss()
    while time.time() < until:
        last: list[Any] = [None]

        def begin(example: Any, last: list[Any] = last) -> None:
            last[0] = example
            # Where it hangs, on standard error, before it is ended.
            faulthandler.dump_traceback_later(0.9 * limit)
            pipe.send(("begin", repr(example)[:2000], counts.examples, counts.refused))
            if time.time() > until + 60:
                raise SystemExit

        try:
            search(target, ROUND, counts, begin, secrets.randbits(32))
            if peak_rss() - held > memory:
                held = peak_rss()
                raise MemoryError(f"{held} bytes")
        except SystemExit:
            break
        except BaseException as e:
            pipe.send(("defect", _place(e), f"{type(e).__name__}: {e}"[:300], repr(last[0])[:600]))
    pipe.send(("end", "", counts.examples, counts.refused))


def _place(error: BaseException) -> str:
    """Where an error came from: the last of our own lines that it went through."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if "outcore" in Path(f.filename).parts or "mlx_lm" in Path(f.filename).parts]
    frame = (ours or frames)[-1]
    return f"{type(error).__name__} at {Path(frame.filename).name}:{frame.lineno} in {frame.name}"


def fuzzed(name: str, folder: Path, seconds: float, limit: float, memory: int) -> Record:
    """One target for so many seconds, in processes that are ended where they hang."""
    context = multiprocessing.get_context("spawn")
    until = time.time() + seconds
    defects: dict[str, Record] = {}
    examples = refused = 0
    while time.time() < until:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_child, args=(name, folder / name, until, limit, memory, theirs))
        process.start()
        theirs.close()
        done, last = (0, 0), "making its files"
        began, waited = False, 0
        while True:
            if not ours.poll(limit if began else 120):
                if began and _busy_elsewhere(process.pid, limit, waited):
                    waited += 1
                    continue
                defects.setdefault(f"longer than {limit:g} s", {"example": last})
                process.kill()
                break
            waited = 0
            try:
                kind, *told = ours.recv()
            except EOFError:
                process.join()
                if process.exitcode:
                    defects.setdefault(f"ended with {process.exitcode}", {"example": last})
                break
            if kind == "defect":
                defects.setdefault(told[0], {"error": told[1], "example": told[2]})
            else:
                began, last, done = True, told[0], (told[1], told[2])
        process.join()
        examples, refused = examples + done[0], refused + done[1]
    found = [{"what": what} | record for what, record in sorted(defects.items())]
    return {"target": name, "examples": examples, "refused": refused, "seconds": round(seconds), "defects": found}


def _busy_elsewhere(pid: int | None, limit: float, waited: int) -> bool:
    """Whether a process has had little of the time that it took: others have the cores. Not for ever."""
    process = psutil.Process(pid)
    before = process.cpu_times()
    time.sleep(1)
    after = process.cpu_times()
    return waited < 10 and after.user + after.system - before.user - before.system < 0.5 * min(1.0, limit)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seconds", type=float, default=5, help="An example takes at most.")
    parser.add_argument("--memory", default="1GB", help="All of a target's take at most.")
    parser.add_argument("--target", nargs="+", help="Default: all.")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    limits = {"seconds": args.seconds, "bytes": parse_size(args.memory)}
    with tempfile.TemporaryDirectory() as folder:
        names = args.target or list(fuzz_targets.targets(Path(folder)))
        each = 60 * args.minutes / len(names)
        results = []
        for name in names:
            results.append(fuzzed(name, Path(folder), each, args.seconds, limits["bytes"]))
            print(json.dumps(results[-1], indent=1), flush=True)
    record = {"machine": asdict(machine(Path.cwd())), "minutes": args.minutes, "limits": limits, "results": results}
    if args.json is not None:
        args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    main()
