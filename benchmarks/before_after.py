"""Speed of two source trees in turn: seconds and processor seconds of a token, and of a load.

    python benchmarks/before_after.py MODEL --before OLD/src --after src --memory 1.7GB --tokens 8 --pairs 10

Each run is a process of its own: it loads the model, writes one warm-up text, then a timed one. With --stay each tree
has one process that loads once and writes every pair's text (a GPU compiles its kernels in every process anew). The
order within a pair alternates. Printed are medians and the median of the pairs' ratios (before over after: above 1 is
faster now) with a 95 % bootstrap interval, and what a token reads and how often it evaluates or waits.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path

CHILD = """
import json, resource, sys, time
def cpu():
    r = resource.getrusage(resource.RUSAGE_SELF)
    return r.ru_utime + r.ru_stime
import mlx.core as mx
counts = {}
def count(name):
    real = getattr(mx, name)
    def wrapper(*args, **kwargs):
        counts[name] = counts.get(name, 0) + 1
        return real(*args, **kwargs)
    setattr(mx, name, wrapper)
for name in ("eval", "async_eval", "synchronize"):
    count(name)
import outcore
folder, options, tokens, prompt = json.loads(sys.argv[1])
from outcore import load, stream_generate
started, used = time.perf_counter(), cpu()
model, tokenizer = load(folder, **options)
result = {"load_s": time.perf_counter() - started, "load_cpu_s": cpu() - used}
def read():
    with open("/proc/self/io") as file:
        return int(dict(line.split(": ") for line in file.read().splitlines())["read_bytes"])
for number, _ in enumerate(sys.stdin):
    out = []
    for response in stream_generate(model, tokenizer, prompt, max_tokens=tokens + 2):
        out.append(response.token)
        if len(out) == 2:
            counts.clear()
            started, used, bytes_before = time.perf_counter(), cpu(), read()
    n = len(out) - 2
    result |= {"token_s": (time.perf_counter() - started) / n, "token_cpu_s": (cpu() - used) / n,
               "token_bytes": (read() - bytes_before) / n,
               "calls": {name: calls / n for name, calls in counts.items()}, "tokens": out}
    result["tree"] = outcore.__file__
    if number:
        print(json.dumps(result), flush=True)
"""


class Tree:
    """The sources of one folder, and the process that runs them."""

    def __init__(self, source: Path, folder: Path, options: dict[str, object], tokens: int) -> None:
        argument = json.dumps([str(folder), options, tokens, "def main(argv):\n    return"])
        paths = [str(source), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.command = [sys.executable, "-c", CHILD, argument]
        self.env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        self.process: subprocess.Popen[str] | None = None
        self.runs: list[dict[str, float]] = []

    def run(self, stay: bool) -> None:
        """Adds the figures of one text."""
        if new := self.process is None:
            pipe = subprocess.PIPE
            self.process = subprocess.Popen(self.command, env=self.env, stdin=pipe, stdout=pipe, text=True)
        assert self.process and self.process.stdin and self.process.stdout
        self.process.stdin.write("\n\n" if new else "\n")
        self.process.stdin.flush()
        if not (line := self.process.stdout.readline()):
            raise SystemExit(f"a process ended with {self.process.wait()}")
        self.runs.append(json.loads(line))
        if not stay:
            self.close()

    def close(self) -> None:
        if self.process and self.process.stdin:
            self.process.stdin.close()
            self.process.wait()
        self.process = None


def ratio(before: list[float], after: list[float]) -> str:
    """Median of the pairs' ratios with its 95 % bootstrap interval."""
    ratios = [b / a for b, a in zip(before, after, strict=True)]
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(4000))
    return f"{statistics.median(ratios):.3f} [{medians[100]:.3f}, {medians[3899]:.3f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--before", type=Path, required=True, help="folder of the older sources")
    parser.add_argument("--after", type=Path, required=True, help="folder of the newer sources")
    parser.add_argument("--memory", help="budget; without it the trees choose")
    parser.add_argument("--options", type=json.loads, default={}, help="further options of load, JSON")
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--stay", action="store_true", help="one process for each tree")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    options = {**args.options, **({"memory": args.memory} if args.memory else {})}
    trees = {name: Tree(getattr(args, name), args.model, options, args.tokens) for name in ("before", "after")}
    runs = {name: tree.runs for name, tree in trees.items()}
    for pair in range(args.pairs):
        order = ("before", "after") if pair % 2 else ("after", "before")
        for name in order:
            trees[name].run(args.stay)
        assert runs["before"][-1].pop("tokens") == runs["after"][-1].pop("tokens"), "the trees wrote different tokens"
        print(*(f"{name} {runs[name][-1]['token_s']:.4f} s" for name in runs), flush=True)
    for tree in trees.values():
        tree.close()
    lines = {}
    for figure in ("token_s", "token_cpu_s", "load_s", "load_cpu_s"):
        before, after = ([run[figure] for run in runs[name]] for name in ("before", "after"))
        lines[figure] = f"{statistics.median(before):.4f} {statistics.median(after):.4f} {ratio(before, after)}"
        print(f"{figure}: {lines[figure]}")
    for name, figures in runs.items():
        print(name, f"{statistics.median(run['token_bytes'] for run in figures):.0f} bytes", figures[-1]["calls"])
    if args.json:
        args.json.write_text(json.dumps({"options": options, "ratios": lines, "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
