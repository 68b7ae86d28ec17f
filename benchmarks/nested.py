"""Layers of which only low bits are read: what putting codes together takes, and what a sweep takes with and without.

    python benchmarks/nested.py join --json FILE
    python benchmarks/nested.py sweep MODEL --memory 2GB --drafts none,self:2 --json FILE

``join``: GB/s of codes, by bits, for a matrix of 4096 x 12288 and for eight of them. ``sweep``: one token at a time and
sixteen, nothing drafted: seconds, bytes read, and the part of a sweep in which codes are put together.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

import _support  # noqa: F401
import outcore
from outcore.machine.device import on_cpu
from outcore.modules.hooks import handles
from outcore_drafts.nested_layers import nested_modules
from outcore_packs.stored_planes import _joined, high_plane, joined, low_plane
from result_file import write_result

CUTS = ((4, 2), (4, 3), (8, 3), (8, 4), (6, 2), (6, 3), (5, 3), (3, 2))


def seconds(run: Any, times: int) -> float:
    mx.eval(run())
    taken = []
    for _ in range(times):
        mx.synchronize()
        began = time.perf_counter()
        mx.eval(run())
        taken.append(time.perf_counter() - began)
    return median(taken)


def join(rows: int, columns: int = 12_288) -> list[dict[str, Any]]:
    found = []
    for bits, high in CUTS:
        words = mx.random.randint(0, 2**32, (rows, columns * bits // 32), dtype=mx.uint32)
        ones = mx.ones((rows, columns // 64))
        planes = high_plane(words, ones, ones, bits, high)[0], low_plane(words, bits, high)
        mx.eval(words, planes)
        equal = mx.array_equal(joined(*planes, bits, high), words).item()
        took = seconds(lambda p=planes, b=bits, h=high: joined(p[0], p[1], b, h), 9)
        fused = seconds(lambda p=planes, b=bits, h=high: _joined(b, h, True)(*p), 3)
        row = {"bits": bits, "high": high, "equal": equal, "gbps": words.nbytes / took / 1e9}
        found.append({**row, "rows": rows, "fused_gbps": words.nbytes / fused / 1e9})
        print(found[-1], flush=True)
    return found


def sweep(model: Path, memory: str, draft: str, resident: int | None) -> dict[str, Any]:
    options: dict[str, Any] = {"memory": memory, "draft": draft, "context": 512, "prompt": 64, "govern": False}
    if resident is not None:
        options["resident"] = resident
    began = time.perf_counter()
    loaded, _ = outcore.load_model(model, **options)
    load_s = time.perf_counter() - began
    with loaded.outcore as session:
        row: dict[str, Any] = {"draft": draft, "memory": memory, "load_s": load_s, "plan": repr(session.plan)}
        for tokens in (1, 16):
            cache, taken = make_prompt_cache(loaded), []
            for n in range(6):
                read = session.metrics.bytes_read
                began = time.perf_counter()
                mx.eval(loaded(mx.array([[5 + n] * tokens]), cache=cache), handles(*cache))
                taken.append(time.perf_counter() - began)
            row[f"s_{tokens}"], row["read"] = median(taken[1:]), session.metrics.bytes_read - read
        some = [m for _, m in nested_modules(loaded) if not m.settled][:8]
        if some:
            columns = [m["biases"].shape[-1] * m.group_size * (m.bits - m.high) // 32 for m in some]
            lows = [mx.ones((m["biases"].shape[0], n), mx.uint32) for m, n in zip(some, columns, strict=True)]
            mx.eval(lows)
            took = seconds(lambda: [m.decode(low) for m, low in zip(some, lows, strict=True)], 5)
            nbytes = sum(m.joined_bytes for m in some)
            row["join_gbps"] = nbytes / took / 1e9
            row["join_s"] = took / nbytes * sum(session.size.layers[i].joined for i in session.plan.streamed)
        row["peak"], row["planned"] = mx.get_peak_memory(), session.plan.peak_bytes
        mx.reset_peak_memory()
    print(row, flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["join", "sweep"])
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--memory", default="1GB", help="one or several, with commas")
    parser.add_argument("--drafts", default="none,self:2")
    parser.add_argument("--resident", type=int)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    if args.what == "join":
        rows = join(4096) if on_cpu() else join(4096) + join(8 * 4096)
    else:
        budgets, drafts = args.memory.split(","), args.drafts.split(",")
        rows = [sweep(args.model, memory, draft, args.resident) for memory in budgets for draft in drafts]
    write_result(args.json, f"nested_{args.what}", args.model or Path.cwd(), rows=rows)


if __name__ == "__main__":
    main()
