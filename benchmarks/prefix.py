"""What a prompt that was computed before takes: seconds to the first token, sweeps, bytes on disk; and the same text.

    python benchmarks/prefix.py MODEL --text TEXT --memory 400MB [--tokens 4096] [--json FILE]

Four loads of the model: without a prefix cache; with one that is empty; after that restart the same prompt; and after
another one a prompt that shares its first nine tenths. Each answer beside that of a run without, greedy, and sampled
with a seed and a penalty on repetitions.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors, make_sampler

import _support  # noqa: F401
from outcore import load, stream_generate
from outcore.decode.prefix import GRID
from result_file import write_result

ANSWER = 24


def answered(model: Any, tokenizer: Any, ids: list[int], **options: Any) -> dict[str, Any]:
    """Seconds and sweeps to the first token, and all tokens: greedy, and in another run sampled."""
    model.outcore.metrics.reset()
    began, first, sweeps = time.perf_counter(), 0.0, 0
    tokens: list[int] = []
    for r in stream_generate(model, tokenizer, ids, max_tokens=ANSWER, **options):
        if not tokens:
            first, sweeps = time.perf_counter() - began, model.outcore.metrics.sweeps
        tokens.append(r.token)
    found = model.outcore.metrics.prompt_found
    mx.random.seed(11)
    ways = {
        "sampler": make_sampler(0.8, top_p=0.9),
        "logits_processors": make_logits_processors(repetition_penalty=1.2, repetition_context_size=5000),
    }
    sampled = [r.token for r in stream_generate(model, tokenizer, ids, max_tokens=ANSWER, **options, **ways)]
    return {"ttft_s": first, "sweeps": sweeps, "found": found, "tokens": tokens, "sampled": sampled}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--memory", required=True)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["OUTCORE_CACHE"] = scratch

        def opened(prefix_cache: str) -> tuple[Any, Any]:
            found: tuple[Any, Any] = load(
                str(args.model), memory=args.memory, context=args.tokens + 64, draft="none", prefix_cache=prefix_cache
            )
            return found

        model, tokenizer = opened("off")
        ids = tokenizer.encode(args.text.read_text())
        prompt = ids[: args.tokens]
        nine = args.tokens * 9 // 10
        shared = [*prompt[:nine], *ids[args.tokens : 2 * args.tokens - nine]]
        with model.outcore:
            plain = {name: answered(model, tokenizer, p, prefill_step_size=GRID) for name, p in
                     (("same", prompt), ("shared", shared))}  # fmt: skip
            cache = make_prompt_cache(model)
            model(mx.array(prompt[:64])[None], cache=cache)
            kv = sum(a.nbytes // a.shape[2] for c in cache if isinstance(c, KVCache) for a in (c.keys, c.values))
        steps = (("empty", "same", prompt), ("repeat", "same", prompt), ("nine tenths", "shared", shared))
        for how, name, asked in steps:
            model, tokenizer = opened("on")
            with model.outcore:
                got = answered(model, tokenizer, asked)
            nbytes = sum(p.stat().st_size for p in Path(scratch).glob("prefix/*/*"))
            right = plain[name]
            row = {
                "how": how,
                "prompt": len(asked),
                **{k: got[k] for k in ("ttft_s", "sweeps", "found")},
                "cold_s": right["ttft_s"],
                "of_cold": got["ttft_s"] / right["ttft_s"],
                "equal": got["tokens"] == right["tokens"],
                "sampled_equal": got["sampled"] == right["sampled"],
                "bytes": nbytes,
                "of_kv": nbytes / (kv * args.tokens),
            }
            rows.append(row)
            print(row, flush=True)
    write_result(args.json, "prefix", args.model, rows=rows)


if __name__ == "__main__":
    main()
