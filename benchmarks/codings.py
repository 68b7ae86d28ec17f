"""Weights stored in fewer bytes: how fast they are decoded, how many bytes they take, and what sweeps take with them.

    python benchmarks/codings.py rates --json FILE
    python benchmarks/codings.py bytes MODEL... --json FILE
    python benchmarks/codings.py sweep MODEL --folder DIR --json FILE

``rates``: GB/s of decoded bfloat16 weights, on MLX's default device; whether all bits are the same, all
65,536 patterns among them. ``bytes``: a model is packed plainly and compactly; bytes that a sweep over all layers
reads of each, and how many weights have an exponent that is not among its matrix's 16. ``sweep``: both copies are
loaded with no layer resident and run one token at a time, in blocks, in turns; ``--folder`` is where copies are
written, on the disk to be read.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

import outcore
from outcore.checkpoint.find_model import resolve_model
from outcore.checkpoint.manifest import SPLIT
from outcore.decode.preparation import prepare
from outcore.machine.device import on_cpu
from outcore.modules.hooks import handles
from outcore_calibrate.layer_times import decode_gbps
from outcore_packs.codings import SplitDecoder, side_table_of
from outcore_packs.full_copy import pack_model
from result_file import write_result

TURNS = 5


def seconds(run: Any, times: int) -> float:
    """Median seconds until what ``run`` returns is computed; the first time compiles kernels."""
    mx.eval(run())
    taken = []
    for _ in range(times):
        mx.synchronize()
        began = time.perf_counter()
        mx.eval(run())
        taken.append(time.perf_counter() - began)
    return median(taken)


def rates() -> list[dict[str, Any]]:
    """One matrix's weights, then eight at once, as a layer has them."""
    rows, columns = (1024, 4096) if on_cpu() else (8192, 8192)
    weights = mx.random.normal((rows, columns), key=mx.random.key(0)) * columns**-0.5
    words = np.array(weights.astype(mx.bfloat16).view(mx.uint16))
    # Every pattern, in among the usual ones.
    spread = np.random.default_rng(0).permutation(words.size)[: 1 << 16]
    words.reshape(-1)[spread] = np.arange(1 << 16)
    side_table = side_table_of(words)
    assert side_table is not None
    decoder = SplitDecoder.of(words.shape, side_table)
    rows_as_stored = np.frombuffer(b"".join(decoder.encoded(words)), np.uint8)
    stored = mx.array(rows_as_stored.reshape(decoder.stored_shape))
    equal = np.array_equal(np.array(decoder.decode(stored).view(mx.uint16)), words)
    found: list[dict[str, Any]] = []
    for matrices in (1, 8):
        took = seconds(lambda n=matrices: [decoder.decode(stored) for _ in range(n)], 5)
        nbytes = matrices * words.nbytes
        found.append({"what": "exponents", "equal": bool(equal), "matrices": matrices, "bytes": nbytes, "s": took})
    copied = seconds(lambda: [mx.concatenate([weights[:1], weights[1:]]) for _ in range(8)], 5)
    found.append({"what": "copying, to compare with", "matrices": 8, "bytes": 8 * weights.nbytes, "s": copied})
    for row in found:
        if "s" in row:
            row["gbps"] = row["bytes"] / row["s"] / 1e9
        print(row, flush=True)
    found.append({"what": "as calibrated", "gbps": decode_gbps()})
    print(found[-1], flush=True)
    return found


def packed(model: Path, folder: Path) -> dict[str, Path]:
    """Copies of a model, by coding."""
    for coding in ("plain", "compact"):
        pack_model(model, folder / coding, coding=coding)
    return {coding: folder / coding for coding in ("plain", "compact")}


def counted(model: Path, folder: Path) -> list[dict[str, Any]]:
    """Bytes of both copies."""
    found: list[dict[str, Any]] = []
    for coding, copy in packed(model, folder).items():
        profile = prepare(copy, memory="16GB").profile
        decoders = profile.lazy.decoders
        split: list[Any] = list(decoders.values())
        weights = sum(s.shape[0] * s.shape[1] for s in split)
        escapes = sum(s.escapes.size - s.shape[0] - 1 for s in split)
        found.append(
            {
                "coding": coding,
                "read": sum(layer.read for layer in profile.size.layers),
                "weights": sum(sum(f.nbytes for f in p.unit.fields) for p in profile.parts if p.unit is not None),
                "stays": sum(d.nbytes for d in decoders.values()),
                SPLIT: len(split),
                "escapes": escapes,
                "escaped": escapes / weights if weights else None,
            }
        )
    for key in ("read", "weights"):
        found[1][f"{key}_share"] = found[1][key] / found[0][key]
    for row in found:
        print(row, flush=True)
    return found


def sweeps(model: Path, folder: Path, memory: str) -> list[dict[str, Any]]:
    """Both copies' sweeps, some of each in turns."""
    rows: dict[str, dict[str, Any]] = {}
    logits: dict[str, mx.array] = {}
    with contextlib.ExitStack() as stack:
        loaded = {}
        for coding, copy in packed(model, folder).items():
            options: dict[str, Any] = {"memory": memory, "resident": 0, "context": 512, "prompt": 64}
            loaded[coding], _ = outcore.load_model(copy, draft="none", govern=False, io="direct", **options)
            stack.callback(loaded[coding].outcore.close)
            rows[coding] = {"coding": coding, "plan": repr(loaded[coding].outcore.plan), "s": []}
        caches = {coding: make_prompt_cache(m) for coding, m in loaded.items()}
        for _ in range(2):
            for coding, m in loaded.items():
                for turn in range(TURNS + 1):
                    read, began = m.outcore.metrics.bytes_read, time.perf_counter()
                    logits[coding] = m(mx.array([[5 + turn]]), cache=caches[coding])
                    mx.eval(logits[coding], handles(*caches[coding]))
                    if turn:  # the first one finds what was read ahead while the other copy's were computed
                        rows[coding]["s"].append(time.perf_counter() - began)
                        rows[coding]["read"] = m.outcore.metrics.bytes_read - read
    equal = bool(mx.array_equal(logits["plain"], logits["compact"]).item())
    for row in rows.values():
        row |= {"median_s": median(row["s"]), "equal": equal}
        print(row, flush=True)
    return list(rows.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["rates", "bytes", "sweep"])
    parser.add_argument("model", nargs="*")
    parser.add_argument("--folder", type=Path, help="where copies are written; default: a temporary one")
    parser.add_argument("--memory", default="60GB")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    if args.what == "rates":
        write_result(args.json, "codings", Path.cwd(), rows=rates())
        return
    rows = []
    for name in args.model:
        model = resolve_model(name)
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            at = Path(folder)
            found = counted(model, at) if args.what == "bytes" else sweeps(model, at, args.memory)
            rows += [{"model": model.name, **row} for row in found]
    write_result(args.json, "codings", args.folder or Path(tempfile.gettempdir()), rows=rows)


if __name__ == "__main__":
    main()
