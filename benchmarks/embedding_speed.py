"""How long 2,000 texts take with a third of an embedding model's bytes as --memory, against all of it in memory.

    python benchmarks/embedding_speed.py [--texts 2000] [--width 512] [--rate 60000000] [--json FILE] TEXTFILE...

A BERT of random weights (float32; its table of tokens as large as its layers), texts of 16 to 256 tokens (60 in the
mean) cut from files; a token is four bytes, hashed. Each run is a process of its own, in turn: all in memory, streamed,
streamed behind a disk of so many bytes a second for each rate (``slow_disk.py``; needs root), all in memory again. The
disk's time is what the run read, by the rate of a plain reading of the file, or of the slow disk. ``ratio``: the run's
seconds by the longer of the disk's and the computing of all in memory (mean of the runs before and after).
``cpu_ratio``: the same of the processor's time alone, which other programs on the machine change less.

MLX's CPU wheel brings the reference BLAS (2 GFLOP/s a core); ``LD_PRELOAD`` of OpenBLAS gives it an ordinary one.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

import _support  # noqa: F401
import embed_zoo
from outcore.machine.allocator import peak_held
from outcore.machine.memory import peak_rss
from outcore_embed.embedder import load
from outcore_embed.texts import Encoded
from result_file import write_result
from slow_disk import GROUPS, slow_disk


def encoded(texts: int, files: list[Path], vocabulary: int, seed: int = 0) -> list[Encoded]:
    data, drawn = b"".join(file.read_bytes() for file in files), random.Random(seed)
    found = []
    for _ in range(texts):
        length = round(16 * 16 ** drawn.random() ** 2)
        at = drawn.randrange(len(data) - 4 * length)
        found.append(Encoded([zlib.crc32(data[at + 4 * n : at + 4 * n + 4]) % vocabulary for n in range(length)]))
    return found


def one_run(folder: Path, memory: str, given: list[Encoded], vectors: Path) -> dict[str, Any]:
    with load(folder, memory=memory, context=256) as model:
        began, used = time.perf_counter(), time.process_time()
        found = model.vectors(given)
        seconds, used = time.perf_counter() - began, time.process_time() - used
        session = model.session
        np.save(vectors, np.array(found))
        return {
            "seconds": seconds, "cpu_s": used, "tokens": sum(len(t.ids) for t in given),
            "readings": session.metrics.sweeps, "bytes_read": session.metrics.bytes_read,
            "rows_read": session.metrics.rows_read, "stall_s": session.metrics.stall_s,
            "resident": len(session.plan.resident), "streamed": len(session.plan.streamed),
            "slots": session.plan.slots, "budget_bytes": session.plan.budget_bytes, "peak_bytes": peak_held(),
            "peak_active_bytes": mx.get_peak_memory(),
            "planned_peak_bytes": session.plan.peak_bytes, "peak_rss_bytes": peak_rss(),
            "reading_tokens": session.size.prompt, "io": session.io,
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
    command += ["--texts", str(arguments.texts), *map(str, arguments.files)]

    def join() -> None:
        if group is not None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=join, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1]) | {"load": os.getloadavg()[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--texts", type=int, default=2000)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rate", type=int, action="append", default=[])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--at", type=Path, help="folder for the model; default: a temporary one")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--work", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        folder, memory, vectors = arguments.work
        config = json.loads(Path(folder, "config.json").read_text())
        given = encoded(arguments.texts, arguments.files, config["vocab_size"])
        print(json.dumps(one_run(Path(folder), memory, given, Path(vectors))))
        return
    rates = arguments.rate if os.access(GROUPS, os.W_OK) else []
    with tempfile.TemporaryDirectory(dir=arguments.at) as place:
        work = Path(place)
        n, wide = arguments.layers, arguments.width
        sizes: dict[str, Any] = {"num_hidden_layers": n, "vocab_size": 12 * wide * n, "hidden_size": wide}
        sizes |= {"num_attention_heads": wide // 64, "intermediate_size": 4 * wide}
        folder = embed_zoo.save_checkpoint("bert", work / "model", **sizes)
        file = folder / "model.safetensors"
        nbytes, rows = file.stat().st_size, list[dict[str, Any]]()
        for limit in [0, None, *rates] * arguments.rounds + [0]:  # bytes a second; 0: all in memory
            kind = "resident" if limit == 0 else "streamed"
            rate = limit or disk_rate(file)
            with slow_disk(folder, limit or None) as group:
                row = started(arguments, folder, "4GB" if limit == 0 else f"{nbytes // 3}B", work / "found.npy", group)
            found, first = np.load(work / "found.npy"), work / "first.npy"
            if not rows:
                np.save(first, found)
            row |= {"equal": bool(np.array_equal(found, np.load(first))), "disk_s": row["bytes_read"] / rate}
            rows.append({"kind": kind, "limit": limit, **row})
            print(json.dumps(rows[-1]), flush=True)
        for n, row in enumerate(rows):
            if row["kind"] == "resident":
                continue
            near = next(r for r in rows[n::-1] if r["limit"] == 0), next(r for r in rows[n:] if r["limit"] == 0)
            for name, mine in (("seconds", "ratio"), ("cpu_s", "cpu_ratio")):
                compute = sum(r[name] for r in near) / 2
                row[mine] = row[name] / (max(compute, row["disk_s"]) if name == "seconds" else compute)
            print(row["limit"], row["ratio"], row["cpu_ratio"], row["equal"], flush=True)
        write_result(arguments.json, "embedding_speed", work, nbytes=nbytes, texts=arguments.texts, runs=rows)


if __name__ == "__main__":
    main()
