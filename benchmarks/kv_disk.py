"""Keys and values on disk: the same bits as in memory, memory that does not grow with the context, and bytes a token.

    python benchmarks/kv_disk.py bits MODEL ... --tokens 8192 [--dtype float32] [--kv-group-size 32] [--json FILE]
    python benchmarks/kv_disk.py flat MODEL --memory 150MB [--contexts 1024,2048,4096,8192,16384] [--json FILE]

``bits``: the same prompt, then a few tokens, with nothing of the model in memory: log-probabilities of each token with
keys and values in memory and on disk, plain and quantized (from the beginning, and from the middle of the answer).
``flat``: one budget, longer and longer texts, each in a process of its own: most bytes that MLX had in use, bytes read
for a token beside those predicted, and seconds for a token beside those that reading so many bytes takes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

import _support  # noqa: F401
from outcore import load_model
from outcore.decode.one_text import generate_step, make_room
from outcore.errors import UsageError
from result_file import write_result

ANSWER = 16

QUANTIZED: dict[str, dict[str, int]] = {
    "plain": {},
    "8 bit from the beginning": {"kv_bits": 8, "quantized_kv_start": 0},
    "4 bit from the middle of the answer": {"kv_bits": 4, "quantized_kv_start": -ANSWER // 2},
}
"""A beginning below 0 counts from the end of prompt and answer."""


def told(model: Any, tokens: int, **options: Any) -> dict[str, Any]:
    """A text of that many tokens that mean nothing, and an answer: tokens, log-probabilities, bytes and seconds."""
    session = model.outcore
    ids = mx.array([(7 * i * i + 3 * i) % min(900, session.vocabulary or 900) for i in range(tokens)], dtype=mx.int32)
    step = make_room(session, tokens + ANSWER, tokens)
    mx.reset_peak_memory()
    session.metrics.reset()
    found: dict[str, Any] = {"tokens": [], "logprobs": []}
    began = time.perf_counter()
    read = first = 0.0
    for token, logprobs, _ in generate_step(
        ids,
        model,
        max_tokens=ANSWER,
        prefill_step_size=step,
        prompt_cache=make_prompt_cache(model),
        leave_last=True,
        **options,
    ):
        mx.eval(logprobs)
        found["tokens"].append(token)
        found["logprobs"].append(mx.array(logprobs))
        if not first:
            first, read = time.perf_counter() - began, session.metrics.bytes_read
    seconds = time.perf_counter() - began - first
    found |= {
        "ttft_s": first,
        "token_s": seconds / (ANSWER - 1),
        "bytes_per_token": (session.metrics.bytes_read - read) / (ANSWER - 1),
        "peak_memory_bytes": mx.get_peak_memory(),
    }
    return found


def bits(folder: Path, tokens: int, dtype: str | None, group_size: int) -> list[dict[str, Any]]:
    """Whether tokens and bits are equal, for each way of keeping keys and values."""
    rows = []
    for name, options in QUANTIZED.items():
        runs = []
        asked = dict(options)
        if asked:
            asked["kv_group_size"] = group_size
        if asked.get("quantized_kv_start", 0) < 0:
            asked["quantized_kv_start"] += tokens + ANSWER
        for where in ("off", "on"):
            model, _ = load_model(
                folder,
                resident=0,
                slots=2,
                context=tokens + ANSWER,
                prompt=tokens,
                draft="none",
                dtype=dtype,
                kv_disk=where,
                memory="18GB",
            )
            with model.outcore as session:
                assert (session.plan.kv_slot > 0) == (where == "on")
                try:
                    runs.append(told(model, tokens, **asked))
                except UsageError as e:
                    print(f"{folder.name}: {name}: {e}", flush=True)  # mlx-lm quantizes no sliding windows
                    break
                except RuntimeError as e:
                    if "No implementation" not in str(e):  # of MLX for CUDA, for some group sizes
                        raise
                    print(f"{folder.name}: {name}, nothing on disk yet: {where == 'off'}: {e}", flush=True)
                    break
        if len(runs) < 2:
            continue
        a, b = runs
        same = all(mx.array_equal(x, y).item() for x, y in zip(a["logprobs"], b["logprobs"], strict=True))
        rows.append({"model": folder.name, "tokens": tokens, "kv": name, "equal": same and a["tokens"] == b["tokens"]})
        rows[-1] |= {"ttft_s": [r["ttft_s"] for r in runs], "token_s": [r["token_s"] for r in runs]}
        print(rows[-1], flush=True)
    return rows


def one_context(folder: Path, memory: str, context: int, dtype: str | None) -> dict[str, Any]:
    """A prompt of so many tokens, and its answer."""
    options: dict[str, Any] = {"draft": "none", "dtype": dtype, "memory": memory}
    model, _ = load_model(folder, context=context + ANSWER, prompt=context, kv_disk="on", **options)
    with model.outcore as session:
        plan = session.plan
        row = told(model, context)
        row.pop("logprobs"), row.pop("tokens")
        return row | {
            "context": context,
            "budget_bytes": plan.budget_bytes,
            "predicted_peak_bytes": plan.peak_bytes,
            "predicted_bytes_per_token": plan.bytes_per_token,
            "predicted_token_s": plan.token_s,
            "predicted_ttft_s": plan.ttft_s,
            "kv_bytes": sum(session.size.kv(i) for i, _ in session.size.kept_apart),
            "resident": len(plan.resident),
            "prefill_step": plan.prefill_step,
        }


def flat(folder: Path, memory: str, contexts: list[int], dtype: str | None) -> list[dict[str, Any]]:
    """Each context in a process of its own."""
    rows = []
    for context in contexts:
        command = [sys.executable, __file__, "one", str(folder), "--memory", memory, "--contexts", str(context)]
        done = subprocess.run([*command, *(["--dtype", dtype] if dtype else [])], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr[-2000:])
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        r = rows[-1]
        print(
            f"{context:>6}: peak {r['peak_memory_bytes'] / 1e6:.1f} MB ({r['resident']} layers resident, caches of "
            f"{r['kv_bytes'] / 1e6:.1f} MB), {r['bytes_per_token'] / 1e6:.2f} MB a token "
            f"({r['bytes_per_token'] / r['predicted_bytes_per_token']:.3f} of predicted), {r['token_s']:.3f} s a token "
            f"(predicted {r['predicted_token_s']:.3f}), first token {r['ttft_s']:.1f} s",
            flush=True,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["bits", "flat", "one"])
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--memory", default="auto")
    parser.add_argument("--contexts", default="1024,2048,4096,8192,16384")
    parser.add_argument("--dtype")
    parser.add_argument("--kv-group-size", type=int, default=32, help="for bits (default: 32)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    contexts = [int(n) for n in args.contexts.split(",")]
    if args.what == "one":
        print(json.dumps(one_context(args.models[0], args.memory, contexts[0], args.dtype)))
        return
    if args.what == "bits":
        rows = [row for folder in args.models for row in bits(folder, args.tokens, args.dtype, args.kv_group_size)]
    else:
        rows = flat(args.models[0], args.memory, contexts, args.dtype)
    write_result(args.json, "kv_disk", args.models[0], rows=rows)


if __name__ == "__main__":
    main()
