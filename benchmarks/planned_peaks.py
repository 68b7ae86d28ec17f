"""Planned peaks against real ones over long prompts, and what a process takes beside its budget.

    python benchmarks/planned_peaks.py --prompts 1024,4096,16384 --json FILE

Tiny models of each kind, in float32 on random weights, each in a process of its own: dense, a hybrid of recurrent and
attention layers, sliding windows, and a dense one with quantized caches; streamed, and with everything resident. What
MLX held at most, freed memory that it keeps included, is to lie within the plan; what the process took beyond what MLX
held is to be the same for every prompt.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

import _support  # noqa: F401
import outcore
import zoo
from outcore.loading.preparation import prepare
from outcore.system.memory import peak_rss, rss
from result_file import write_result
from stand_ins import TokensOnly

TOKENS = 4
WIDE = {
    "hidden_size": 256, "num_hidden_layers": 6, "intermediate_size": 512, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 2048, "max_position_embeddings": 65536,
}  # fmt: skip
KINDS = {"dense": "qwen3", "hybrid": "qwen3_5", "windows": "gemma3_text", "quantized": "qwen3"}


@dataclass(frozen=True)
class Peak:
    """Of one run. Bytes.

    Attributes:
        peak: the most that MLX held, with what it kept for reuse; ``planned``: that the plan says.
        before: resident memory of the process before the model was loaded; ``process``: its most.
        beside: of the process, beyond what it was before and what MLX held.
    """

    kind: str
    resident: bool
    prompt: int
    budget: int
    planned: int
    peak: int
    before: int
    process: int
    beside: int
    chunk: int


def save(kind: str, folder: Path) -> Path:
    """A checkpoint of the kind; layers wide enough that caches weigh more than all else after a long prompt."""
    config = zoo.CONFIGS[KINDS[kind]]
    wide = config | {"text_config": config["text_config"] | WIDE} if "text_config" in config else config | WIDE
    if kind == "windows":
        wide |= {"sliding_window": 512, "query_pre_attn_scalar": 64}
    zoo.CONFIGS[KINDS[kind]] = wide
    return zoo.save_checkpoint(KINDS[kind], folder)


def run(kind: str, folder: Path, prompt: int, resident: bool) -> Peak:
    """Load for a prompt, answer it with a few tokens, and see."""
    options: dict[str, Any] = {"context": prompt + TOKENS, "prompt": prompt, "draft": "none"}
    more = {"kv_bits": 8, "kv_group_size": 64, "quantized_kv_start": 0} if kind == "quantized" else {}
    options["resident"] = None if resident else 0
    least = prepare(folder, memory=1, least=True, **options).planning.smallest
    budget = "4GB" if resident else int(least * 1.1)
    before = rss()
    model, _ = outcore.load_model(folder, memory=budget, govern=False, **options)
    ids = [3 + (7919 * i) % 1000 for i in range(prompt)]
    with model.outcore as session:
        assert (session.streaming is None) == resident
        for _ in outcore.stream_generate(model, TokensOnly(), ids, max_tokens=TOKENS, **more):
            pass
        peak = mx.get_peak_memory() + mx.get_cache_memory()
        plan, process = session.plan, peak_rss()
        return Peak(
            kind, resident, prompt, plan.budget_bytes, plan.peak_bytes, peak, before, process,
            max(0, process - before - peak), plan.prefill_step,
        )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description="Planned peaks against real ones over long prompts.")
    parser.add_argument("--prompts", default="1024,4096,16384")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        kind, folder, prompt, resident = args.one
        print(json.dumps(asdict(run(kind, Path(folder), int(prompt), resident == "resident"))))
        return 0
    found = []
    with tempfile.TemporaryDirectory() as root:
        for kind in args.kinds.split(","):
            folder = save(kind, Path(root) / kind)
            for resident in ("streamed", "resident"):
                for prompt in args.prompts.split(","):
                    command = [sys.executable, __file__, "--one", kind, str(folder), prompt, resident]
                    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
                    found.append(json.loads(out.splitlines()[-1]))
                    print(json.dumps(found[-1]), flush=True)
    assert all(r["peak"] <= r["planned"] for r in found), "a plan was passed"
    write_result(args.json, "planned_peaks", Path.cwd(), rows=found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
