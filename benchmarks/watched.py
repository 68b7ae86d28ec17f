"""What being published costs: the same texts with and without the thread that writes snapshots, in turns.

    python benchmarks/watched.py MODEL --memory SIZE --pairs 20 --json FILE

A model of many small layers is the dearest, since a snapshot has a letter for each and its sweeps are short. The pairs'
order alternates. The machine's other work shows in the seconds, less in the processor time of this process, its reading
and publishing threads included: both are told, as medians of the pairs' ratios with their quartiles. As many pairs that
write nothing in either half say what the method itself finds where there is nothing to be found. The publishing
thread's own processor time is read from its clock (Linux): the least noisy of all, and blind to what its turns at
Python's lock keep others from.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import mlx_lm.utils

import outcore
from outcore.checkpoint.find_model import resolve_model
from outcore.decode.generate import stream_generate
from outcore.monitoring import files, publish
from outcore.monitoring.publisher import board
from result_file import write_result

PROMPT = "def read_lines(path):\n    "


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Seconds and processor seconds of each half of each pair."""
    tokenizer = mlx_lm.utils.load_tokenizer(folder)
    tokenizer._eos_token_ids = set()
    prompt = tokenizer.encode(PROMPT)
    context = len(prompt) + args.tokens
    model, _ = outcore.load_model(
        folder, memory=args.memory, resident=0, context=context, prompt=len(prompt), draft="none", govern=False
    )

    def text() -> tuple[float, float]:
        began, used = time.perf_counter(), time.process_time()
        for _ in stream_generate(model, tokenizer, prompt, max_tokens=args.tokens):
            pass
        return time.perf_counter() - began, time.process_time() - used

    with model.outcore as session, tempfile.TemporaryDirectory(prefix="oc") as base:
        files.runtime_folder = lambda: Path(base) / "outcore"
        if not publish(model, "watched.py"):
            raise SystemExit("no snapshot can be written here")
        text()
        found: dict[str, Any] = {"layers": len(session.size.layers), "sweeps_each": args.tokens, "publisher_s": 0.0}
        for name, on in (("published", True), ("nobody", False)):
            pairs = []
            for n in range(args.pairs):
                halves = {}
                for published in (True, False) if n % 2 else (False, True):
                    board.end()
                    if not (published and on):
                        halves[published] = text()
                        continue
                    board.begin()
                    (thread,) = (t for t in threading.enumerate() if t.name == "outcore-monitor")
                    clock = time.pthread_getcpuclockid(thread.ident or 0)
                    began = time.clock_gettime(clock)
                    halves[published] = text()
                    found["publisher_s"] += time.clock_gettime(clock) - began
                pairs.append([*halves[True], *halves[False]])
            found[name] = summary(pairs)
        return found


def summary(pairs: list[list[float]]) -> dict[str, Any]:
    """The ratios of pairs of (seconds, processor seconds) with and without."""
    told: dict[str, Any] = {"pairs": pairs}
    for name, at in (("seconds", 0), ("processor", 1)):
        ratios = [p[at] / p[at + 2] for p in pairs]
        low, middle, high = statistics.quantiles(ratios, n=4)
        told[name] = {"median": middle, "quartiles": [low, high]}
        told[name]["of_sums"] = sum(p[at] for p in pairs) / sum(p[at + 2] for p in pairs)
    return told


def main() -> None:
    """Run it and print a line for each kind of time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--memory", default="64MB")
    parser.add_argument("--tokens", type=int, default=100, help="of each text, a sweep each")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    folder = resolve_model(args.model)
    found = measure(args, folder)
    pairs = found["published"]["pairs"]
    share, core = (found["publisher_s"] / sum(p[i] for p in pairs) for i in (1, 0))
    print(f"publishing thread: {share:.2%} of the processor time, {core:.2%} of a core")
    print(f"{found['layers']} layers, {args.tokens} sweeps a text")
    for name in ("published", "nobody"):
        for kind in ("seconds", "processor"):
            ratio = found[name][kind]
            low, high = ratio["quartiles"]
            print(f"{name:9} {kind:10} {ratio['median']:.4f} ({low:.4f} to {high:.4f}); of sums {ratio['of_sums']:.4f}")
    write_result(args.json, "watched", folder, **found)


if __name__ == "__main__":
    main()
