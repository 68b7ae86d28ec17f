"""What being watched costs: the same texts with and without somebody connected to the process's socket, in turns.

    python benchmarks/watched.py MODEL --memory SIZE --pairs 20 --json FILE

A model of many small layers is the dearest to watch, since a snapshot has a letter for each and its sweeps are short.
Who watches is a process of its own, as ``outcore monitor`` is. The pairs' order alternates. The machine's other work
shows in the seconds, less in the processor time of this process, its reading and publishing threads included: both are
told, as medians of the pairs' ratios with their quartiles. As many pairs of which nobody is watched in either half say
what the method itself finds where there is nothing to be found. The publishing thread's own processor time is read
from its clock (Linux): the least noisy of all, and blind to what its turns at Python's lock keep others from.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx_lm.utils

import outcore
from outcore.checkpoint.find_model import resolve_model
from outcore.decode.generate import stream_generate
from outcore.monitoring import publish, sockets
from result_file import write_result

PROMPT = "def read_lines(path):\n    "

WATCHER = """if True:
    import os, select, socket, sys
    sys.stdin = os.fdopen(0, "rb", 0)
    connection, lines = None, 0
    while True:
        ready, _, _ = select.select([0] + ([connection] if connection else []), [], [])
        if connection in ready:
            lines += connection.recv(1 << 20).count(b"\\n")
        if 0 in ready:
            if not (asked := os.read(0, 1)):
                break
            if connection:
                connection.close()
                connection = None
            if asked == b"+":
                connection = socket.socket(socket.AF_UNIX)
                connection.connect(sys.argv[1])
            print(lines, flush=True)
"""


@contextmanager
def watcher(path: Path) -> Iterator[Callable[[bool], int]]:
    """What connects a process of its own to the socket, or lets it go; tells the lines that it got so far."""
    process = subprocess.Popen([sys.executable, "-c", WATCHER, str(path)], stdin=-1, stdout=-1)
    assert process.stdin is not None and process.stdout is not None
    ins, outs = process.stdin, process.stdout

    def watch(on: bool) -> int:
        ins.write(b"+" if on else b"-")
        ins.flush()
        return int(outs.readline())

    try:
        yield watch
    finally:
        ins.close()
        process.wait()
        outs.close()


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Seconds and processor seconds of each half of each pair."""
    tokenizer = mlx_lm.utils.load_tokenizer(folder)
    tokenizer._eos_token_ids = set()
    prompt = tokenizer.encode(PROMPT)
    model, _ = outcore.load_model(
        folder,
        memory=args.memory,
        resident=0,
        context=len(prompt) + args.tokens,
        prompt=len(prompt),
        draft="none",
        govern=False,
    )
    with model.outcore as session, tempfile.TemporaryDirectory(prefix="oc") as base:
        sockets.socket_folder = lambda: Path(base) / "outcore"
        if not publish(model, "watched.py"):
            raise SystemExit("no socket can be made here")
        (path,) = (Path(base) / "outcore").iterdir()

        def text() -> tuple[float, float]:
            began, used = time.perf_counter(), time.process_time()
            for _ in stream_generate(model, tokenizer, prompt, max_tokens=args.tokens):
                pass
            return time.perf_counter() - began, time.process_time() - used

        (thread,) = (t for t in threading.enumerate() if t.name == "outcore-monitor")
        clock = time.pthread_getcpuclockid(thread.ident or 0)
        with watcher(path) as watch:
            text()
            own = time.clock_gettime(clock)
            found: dict[str, Any] = {"layers": len(session.size.layers), "sweeps_each": args.tokens}
            for name, on in (("watched", True), ("nobody", False)):
                pairs = []
                for n in range(args.pairs):
                    halves = {}
                    for watched in (True, False) if n % 2 else (False, True):
                        watch(watched and on)
                        halves[watched] = text()
                        lines = watch(False)
                    pairs.append([*halves[True], *halves[False]])
                found[name] = summary(pairs)
                if on:
                    found["lines"] = lines
                    found["publisher_s"] = time.clock_gettime(clock) - own
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
    share = found["publisher_s"] / sum(p[1] for p in found["watched"]["pairs"])
    each_ms = 1000 * found["publisher_s"] / max(1, found["lines"])
    print(f"publishing thread: {share:.2%} of the processor time, {each_ms:.2f} ms a snapshot")
    print(f"{found['layers']} layers, {args.tokens} sweeps a text, {found['lines']} snapshots")
    for name in ("watched", "nobody"):
        for kind in ("seconds", "processor"):
            ratio = found[name][kind]
            low, high = ratio["quartiles"]
            print(f"{name:8} {kind:10} {ratio['median']:.4f} ({low:.4f} to {high:.4f}); of sums {ratio['of_sums']:.4f}")
    write_result(args.json, "watched", folder, **found)


if __name__ == "__main__":
    main()
