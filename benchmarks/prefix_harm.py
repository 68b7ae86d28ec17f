"""What a prefix cache suffers: killed writers, flipped bits, sixteen processes at once. No answer may change.

    python benchmarks/prefix_harm.py [--kills 1000] [--flips 1000] [--processes 16 --seconds 60] [--json FILE]

Kills: processes that compute prompts with a tiny hybrid model and keep them are killed by SIGKILL at any moment; after
each the same prompts are answered here, with what they left. Flips: a bit of one of the files, then an answer. Last,
processes that write, read and drop files within a small limit.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.models.cache import make_prompt_cache

import _support  # noqa: F401
import zoo
from outcore.decode.prefix_cache import GRID
from outcore_prefix import blocks as on_disk
from outcore_prefix.blocks import BlockFiles
from outcore_prefix.prefix_cache import StoredPrompts
from result_file import write_result

SHARED = [(7 * i * i + 3 * i + 1) % 59 + 1 for i in range(2 * GRID)]
PROMPTS = [[*SHARED[: GRID + 100 * n], *([n + 2] * 90)] for n in range(5)]


def answered(model: Any, prefix: StoredPrompts | None, prompt: list[int]) -> npt.NDArray[np.float32]:
    """The logits of a prompt's last position and of two tokens behind it, computed from what is there, and kept."""
    found = prefix.find(prompt) if prefix is not None else None
    cache, held = (found.cache, found.tokens) if found is not None else (make_prompt_cache(model), 0)
    logits = found.logits if found is not None else None
    if logits is None:
        recording = prefix.recording(prompt, held=held) if prefix is not None else None
        ends = [*range(held + GRID, len(prompt) - 1, GRID), len(prompt) - 1, len(prompt)]
        for a, b in zip([held, *ends], ends, strict=False):
            logits = model(mx.array(prompt[a:b])[None], cache=cache)[:, -1, :]
            if recording is not None:
                recording.passed(b, cache)
        assert logits is not None
        mx.eval(logits, [c.state for c in cache])
        if recording is not None:
            recording.save(cache, logits)
    rows = [np.array(logits)]
    for token in (3, 4):
        rows.append(np.array(model(mx.array([[token]]), cache=cache)[:, -1, :]))
    return np.concatenate(rows)


def opened(model: Any) -> StoredPrompts:
    return StoredPrompts(BlockFiles("model-0000000000000000-00000000"), ["harm"], lambda: make_prompt_cache(model))


def writer(seed: int, ready: Any) -> None:
    mx.random.seed(0)
    model = zoo.build("qwen3_5")
    prefix, rng = opened(model), random.Random(seed)
    ready.set()
    while True:
        answered(model, prefix, rng.choice(PROMPTS))
        # So that there is something to write.
        for path in sorted(prefix.blocks.folder.iterdir())[:: rng.randrange(2, 5)]:
            path.unlink(missing_ok=True)


def busy(number: int, until: float, limit: int, queue: Any) -> None:
    kept, rng, read, wrong = BlockFiles("model-0000000000000000-00000000", limit), random.Random(number), 0, 0
    while time.time() < until:
        value = rng.randrange(200)
        kept.write(f"{value}.kv", {"0.k": mx.full((1, 2, 64, 32), value, mx.float32)})
        kept.drop()
        other = rng.randrange(200)
        block = kept.read(f"{other}.kv")
        if block is not None:
            read += 1
            wrong += not bool(mx.all(block.arrays["0.k"] == other))
    queue.put((read, wrong))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    on_disk.LEAST_FREE = 0
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["OUTCORE_CACHE"] = scratch
        mx.random.seed(0)
        model = zoo.build("qwen3_5")
        expected = [answered(model, None, prompt) for prompt in PROMPTS]
        wrong = killed = flipped = found = damaged = 0
        rng = random.Random(1)
        while killed < args.kills:
            ready = context.Event()
            process = context.Process(target=writer, args=(killed, ready), daemon=True)
            process.start()
            ready.wait(60)
            time.sleep(rng.uniform(0, 0.25))
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            killed += 1
            prefix = opened(model)
            files = [f.name for f in prefix.blocks.folder.iterdir() if not f.name.startswith(".")]
            damaged += sum(prefix.blocks.read(name) is None for name in files)
            n = rng.randrange(len(PROMPTS))
            found += prefix.find(PROMPTS[n]) is not None
            wrong += not np.array_equal(answered(model, prefix, PROMPTS[n]), expected[n])
            print(f"{killed} killed, {found} found something, {damaged} files damaged, {wrong} wrong", end="\r")
        print()
        prefix = opened(model)
        while flipped < args.flips:
            n = rng.randrange(len(PROMPTS))
            answered(model, prefix, PROMPTS[n])
            path = rng.choice([p for p in prefix.blocks.folder.iterdir() if not p.name.startswith(".")])
            data = bytearray(path.read_bytes())
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            path.write_bytes(data)
            flipped += 1
            wrong += not np.array_equal(answered(model, prefix, PROMPTS[n]), expected[n])
        print(f"{flipped} bits flipped, {wrong} wrong")
        limit = 2_000_000
        queue, until = context.Queue(), time.time() + args.seconds + 10
        workers = [context.Process(target=busy, args=(n, until, limit, queue)) for n in range(args.processes)]
        for worker in workers:
            worker.start()
        results = [queue.get(timeout=args.seconds + 120) for _ in workers]
        for worker in workers:
            worker.join()
        BlockFiles("model-0000000000000000-00000000", limit).drop()
        size = sum(p.stat().st_size for p in (Path(scratch) / on_disk.FOLDER).rglob("*") if p.is_file())
        failed = sum(worker.exitcode != 0 for worker in workers)
        reads, bad = (sum(r[i] for r in results) for i in (0, 1))
        print(f"{args.processes} processes: {failed} failed, {reads} reads, {bad} wrong; {size} of {limit} bytes")
    row = {
        "kills": killed, "found_after_kill": found, "damaged": damaged, "flips": flipped, "wrong": wrong,
        "processes": args.processes, "seconds": args.seconds, "failed": failed, "reads": reads, "wrong_reads": bad,
        "bytes": size, "limit": limit,
    }  # fmt: skip
    write_result(args.json, "prefix_harm", Path(), rows=[row])
    return int(bool(wrong or failed or bad or size > limit))


if __name__ == "__main__":
    sys.exit(main())
