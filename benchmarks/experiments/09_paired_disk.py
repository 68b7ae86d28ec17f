"""Does streaming read as fast as a reader that does nothing else, token by token in turn with it?

A disk that others use drifts within seconds, so a ceiling measured a minute before says little. Here a plain reader
reads what one token reads, then three tokens are decoded (the first one not counted: it finds full slots), and so on.

    python benchmarks/experiments/09_paired_disk.py MODEL --resident 0,25,50,75 --json FILE
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx

from outcore.decode.generate import generate_step
from outcore.decode.loader import load_model
from outcore.disk.reader import THREADS, FileReader, Read
from outcore.disk.ring import Slot
from outcore_bench import disk as fingerprint
from outcore_bench.measure import prompt_ids

TOKENS = 2


def plain(model: Any, slots: list[Slot]) -> float:
    """GB/s of a reader of its own over all units of a sweep."""
    streaming = model.outcore.streaming
    units = [streaming.ring.units[i] for i in streaming.layers.order]
    files = sorted({e.file for u in units for e in u.extents})
    io = model.outcore.io
    reader = FileReader(files, io=io, threads=THREADS)
    began = time.perf_counter()
    under_way: list[Read] = []
    for i, unit in enumerate(units):
        if len(under_way) == len(slots):
            under_way.pop(0).wait()
        under_way.append(reader.submit("plain", unit.extents, slots[i % len(slots)].payload))
    for read in under_way:
        read.wait()
    seconds = time.perf_counter() - began
    reader.close()
    return sum(u.read_bytes for u in units) / seconds / 1e9


def pairs(folder: str, resident: int, rounds: int, dtype: str | None) -> dict[str, Any]:
    """Rates of the plain reader and of decoding, in turn."""
    model, _ = load_model(folder, resident=resident, io="direct", context=600, prompt=8, dtype=dtype, govern=False)
    session = model.outcore
    with session:
        largest = max(u.slot_bytes for u in session.streaming.ring.units)
        device = "cpu" if mx.default_device().type == mx.DeviceType.cpu else "gpu"
        slots = [Slot(largest, device) for _ in range(2)]
        nbytes = session.plan.bytes_per_token
        prompt = mx.array(prompt_ids(8), dtype=mx.int32)
        step = session.plan.prefill_step
        run = generate_step(prompt, model, max_tokens=500, prefill_step_size=step)
        next(run)
        next(run)
        readers, tokens = [plain(model, slots)], []
        for _ in range(rounds):
            next(run)
            began = time.perf_counter()
            for _ in range(TOKENS):
                next(run)
            tokens.append((time.perf_counter() - began) / TOKENS)
            time.sleep(0.3)  # what is read ahead for the next token ends
            readers.append(plain(model, slots))
        del run
    ratios = [nbytes / 1e9 / s / statistics.mean(readers[i : i + 2]) for i, s in enumerate(tokens)]
    return {
        "resident": resident,
        "bytes_per_token": nbytes,
        "reader_gbps": readers,
        "token_s": tokens,
        "ratios": ratios,
        "median_ratio": statistics.median(ratios),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--resident", default="0,25,50,75", help="per cent of layers")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        print(json.dumps(pairs(args.model, args.child, args.rounds, args.dtype)))
        return 0
    results = []
    for share in map(int, args.resident.split(",")):
        count = args.layers * share // 100
        command = [sys.executable, __file__, args.model, "--child", str(count), "--rounds", str(args.rounds)]
        done = subprocess.run(command + (["--dtype", args.dtype] if args.dtype else []), capture_output=True, text=True)
        if done.returncode:
            print(done.stderr[-400:], file=sys.stderr)
            continue
        results.append({"share": share} | json.loads(done.stdout.splitlines()[-1]))
        r = results[-1]
        print(
            f"{share} %: {r['median_ratio']:.3f} of the plain reader ({statistics.median(r['reader_gbps']):.2f} GB/s)"
        )
        if args.json is not None:
            document = {
                "question": (__doc__ or "").splitlines()[0],
                "machine": asdict(fingerprint.machine(Path(args.model))),
                "model": Path(args.model).name,
                "results": results,
            }
            args.json.write_text(json.dumps(document, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
