"""How long 2,000 texts take with a third of an embedding model's bytes as --memory, against all of it in memory.

    python benchmarks/embedding_speed.py [--texts 2000] [--layers 8] [--rate 60000000] [--json FILE]

A BERT of random weights and BERT's width (float32). Each run is a process of its own, in turn: all in memory, streamed,
streamed behind a disk of so many bytes a second (``slow_disk.py``; needs root), all in memory again. The disk's time is
what the run read, by the rate of a plain reading of the file, or of the slow disk. ``ratio``: the run's seconds by the
longer of the disk's and the computing of all in memory (the faster one of the two).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import _support  # noqa: F401
import embed_zoo
from outcore.machine.allocator import peak_held
from outcore.machine.memory import peak_rss
from outcore_embed.embedder import load
from result_file import write_result
from slow_disk import GROUPS, slow_disk

WIDE = {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}


def one_run(folder: Path, memory: str, texts: int, words: int, vectors: Path) -> dict[str, Any]:
    given = embed_zoo.texts(texts, longest=words)
    with load(folder, memory=memory, context=32) as model:
        encoded = model.reader.encode(given)
        began, used = time.perf_counter(), time.process_time()
        found = model.vectors(encoded)
        seconds, used = time.perf_counter() - began, time.process_time() - used
        session = model.session
        np.save(vectors, np.array(found))
        return {
            "seconds": seconds, "cpu_s": used, "tokens": sum(len(t.ids) for t in encoded),
            "readings": session.metrics.sweeps,
            "bytes_read": session.metrics.bytes_read, "stall_s": session.metrics.stall_s,
            "resident": len(session.plan.resident), "streamed": len(session.plan.streamed),
            "slots": session.plan.slots, "budget_bytes": session.plan.budget_bytes, "peak_bytes": peak_held(),
            "peak_rss_bytes": peak_rss(), "reading_tokens": session.size.prompt, "io": session.io,
        }  # fmt: skip


def disk_rate(file: Path) -> float:
    """Bytes a second of one plain direct reading in 8 MiB pieces."""
    fd, began, done = os.open(file, os.O_RDONLY | getattr(os, "O_DIRECT", 0)), time.perf_counter(), 0
    import mmap

    buffer = mmap.mmap(-1, 1 << 23)
    while (n := os.preadv(fd, [buffer], done)) > 0:
        done += n
        if n < len(buffer):
            break
    os.close(fd)
    return done / (time.perf_counter() - began)


def started(arguments: argparse.Namespace, folder: Path, memory: str, vectors: Path, group: Path | None) -> Any:
    command = [sys.executable, __file__, "--work", str(folder), memory, str(vectors)]
    command += ["--texts", str(arguments.texts), "--words", str(arguments.words)]

    def join() -> None:
        if group is not None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=join, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1]) | {"load": os.getloadavg()[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=2000)
    parser.add_argument("--words", type=int, default=22, help="most words of a text")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rate", type=int, default=60_000_000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--work", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        folder, memory, vectors = arguments.work
        print(json.dumps(one_run(Path(folder), memory, arguments.texts, arguments.words, Path(vectors))))
        return
    with tempfile.TemporaryDirectory() as place:
        work = Path(place)
        sizes: dict[str, Any] = {"num_hidden_layers": arguments.layers, **WIDE}
        folder = embed_zoo.save_checkpoint("bert", work / "model", **sizes)
        file = folder / "model.safetensors"
        nbytes, rate = file.stat().st_size, disk_rate(file)
        third, rows = f"{nbytes // 3}B", list[dict[str, Any]]()
        slow = arguments.rate if os.access(GROUPS, os.W_OK) else None
        for kind in ("resident", "streamed", *(["slow disk"] if slow else []), "resident"):
            with slow_disk(folder, slow if kind == "slow disk" else None) as group:
                memory = "4GB" if kind == "resident" else third
                row = started(arguments, folder, memory, work / f"{kind}.npy", group)
            rows.append({"kind": kind, **row})
            print(json.dumps(rows[-1]), flush=True)
        compute = min(r["seconds"] for r in rows if r["kind"] == "resident")
        for row in rows:
            if row["kind"] != "resident":
                row["disk_s"] = row["bytes_read"] / (slow if row["kind"] == "slow disk" and slow else rate)
                row["ratio"] = row["seconds"] / max(compute, row["disk_s"])
                row["equal"] = bool(
                    np.array_equal(np.load(work / f"{row['kind']}.npy"), np.load(work / "resident.npy"))
                )
                print(row["kind"], row["ratio"], row["equal"], flush=True)
        told = {"nbytes": nbytes, "disk_rate": rate, "slow_rate": slow, "texts": arguments.texts, "compute_s": compute}
        write_result(arguments.json, "embedding_speed", work, **told, runs=rows)


if __name__ == "__main__":
    main()
