"""A model at the smallest budget that works for it: runs there, keeps to it, and gives mlx-lm's logits bit for bit.

    python benchmarks/smallest.py MODEL ... --dtype float32 --json FILE

Ours and mlx-lm's, with everything in memory, run one after the other in processes of their own; logits of a prompt in
two passes and of one more token are compared by digest.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.utils
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from rich.console import Console
from rich.table import Table

from outcore.checkpoint.find_model import resolve_model
from outcore.decode.loader import load_model
from outcore.decode.preparation import prepare
from outcore.errors import BudgetError
from outcore.machine.device import COMPUTE_DTYPES
from outcore.machine.memory import peak_rss
from result_file import write_result

PASSES = ([3, 14, 15], [9], [26])
OPTIONS: dict[str, Any] = {"context": 8, "prompt": 4}


def digests(model: Any) -> list[str]:
    """Of the logits of each pass."""
    cache = make_prompt_cache(model)
    found = []
    for ids in PASSES:
        logits = model(mx.array([ids]), cache=cache)
        mx.eval(logits)
        found.append(hashlib.sha256(np.array(logits.astype(mx.float32)).tobytes()).hexdigest())
    return found


def ours(folder: str, dtype: str | None) -> dict[str, Any]:
    try:
        least = prepare(folder, memory=1, dtype=dtype, **OPTIONS).plan.smallest_budget_bytes
    except BudgetError as e:
        assert e.smallest is not None
        least = e.smallest
    model, _ = load_model(folder, memory=least, dtype=dtype, govern=False, draft="none", **OPTIONS)
    with model.outcore as session:
        began = time.perf_counter()
        found = digests(model)
        return {
            "logits": found,
            "budget_bytes": least,
            "peak_bytes": int(mx.get_peak_memory()) + int(mx.get_cache_memory()),
            "peak_rss_bytes": peak_rss(),
            "s_per_pass": (time.perf_counter() - began) / len(PASSES),
            "parts": len(session.plan.parts),
            "units": len(session.streaming.layers.units),
            "slots": session.plan.slots,
            "head_streamed": session.plan.head_streamed,
            "bytes_per_token": session.plan.bytes_per_token,
        }


def theirs(folder: str, dtype: str | None) -> dict[str, Any]:
    model, _ = mlx_lm.utils.load_model(Path(folder))
    if dtype is not None:
        model.set_dtype(COMPUTE_DTYPES[dtype])
        mx.eval(model.parameters())
    return {"logits": digests(model), "peak_bytes": int(mx.get_peak_memory())}


def child(which: str, folder: Path, dtype: str | None) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", which, str(folder), *(["--dtype", dtype] if dtype else [])]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"ended by signal {-done.returncode}"]
        return {"error": last[0]}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description="The smallest budget: kept to, and exact.")
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--dtype", choices=COMPUTE_DTYPES)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--child", choices=["ours", "theirs"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps({"ours": ours, "theirs": theirs}[args.child](args.models[0], args.dtype)))
        return 0
    table = Table("model", "on disk", "smallest budget", "peak", "process", "s a pass", "logits")
    results = []
    for model in args.models:
        folder = resolve_model(model)
        nbytes = sum(f.stat().st_size for f in folder.glob("*.safetensors"))
        a, b = child("ours", folder, args.dtype), child("theirs", folder, args.dtype)
        known = "logits" in a and "logits" in b
        equal = a["logits"] == b["logits"] if known else None
        results.append({"model": folder.name, "nbytes": nbytes, "ours": a, "mlx_lm": b, "equal": equal})
        if "error" in a:
            table.add_row(folder.name, f"{nbytes / 1e9:.2f} GB", "-", "-", "-", "-", a["error"])
        else:
            said = "equal" if equal else "NOT EQUAL" if known else f"mlx-lm: {b['error']}"
            table.add_row(
                folder.name,
                f"{nbytes / 1e9:.2f} GB",
                f"{a['budget_bytes'] / 1e6:.0f} MB",
                f"{a['peak_bytes'] / 1e6:.0f} MB",
                f"{a['peak_rss_bytes'] / 1e6:.0f} MB",
                f"{a['s_per_pass']:.1f}",
                said,
            )
        Console(stderr=True).print(
            f"{folder.name}: {'equal' if equal else a.get('error') or b.get('error') or 'NOT EQUAL'}"
        )
        write_result(args.json, "smallest", folder, results=results)
    Console().print(table)
    return 0 if all(r["equal"] for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
