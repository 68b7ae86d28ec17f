"""Seconds a token on several ranks whose disks are slow, with layers in turn and one behind the other.

    python benchmarks/rank_speed.py [--rate 40] [--ranks 1,2,4] [--tokens 8] [--json FILE]

A random Llama of 16 layers of 4 MB, of which no rank keeps any; ranks are processes of this machine joined by pipes,
and each reads ``--rate`` MB/s at most (``limited_reader``). The model is small, so reading is what takes the time, and
the pipes stand for a link that costs next to nothing. Texts are compared with one rank's.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx_lm.utils

import _support  # noqa: F401
import outcore
import rank_work
import zoo
from limited_reader import limit_reads
from outcore_cluster.link_protocol import Link
from outcore_tools.demo import demo_model
from rank_processes import RankProcesses
from result_file import shown_arguments

LAYERS, PROMPT = 16, 256


def timed(link: Link | None, folder: Path, tokens: int, rate: float, in_turn: bool) -> dict[str, Any]:
    """A text, and what it took: the median of all tokens but the first, the time to that, bytes a sweep."""
    limit_reads(rate)
    model = rank_work.loaded(
        None if link is not None and link.size == 1 else link, folder, in_turn, resident=0, context=512, prompt=PROMPT
    )
    with demo_model() as demo:
        tokenizer = mlx_lm.utils.load_tokenizer(demo)
    tokenizer.eos_token_ids = set()
    prompt = [(7 * n * n + 3) % 60 + 2 for n in range(PROMPT)]
    with model.outcore as session:
        at = [time.perf_counter()]
        found: list[int] = []
        for r in outcore.stream_generate(model, tokenizer, prompt, max_tokens=tokens, prefill_step_size=64):
            found.append(r.token)
            at.append(time.perf_counter())
        steps = [b - a for a, b in itertools.pairwise(at[1:])]
        return {
            "tokens": found,
            "token_s": round(statistics.median(steps), 4),
            "first_s": round(at[1] - at[0], 4),
            "bytes_per_sweep": session.metrics.bytes_read // max(1, session.metrics.sweeps),
        }


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure seconds a token on several ranks with slow disks.")
    parser.add_argument("--rate", type=float, default=40.0, help="MB/s of each rank (default: 40)")
    parser.add_argument("--ranks", default="1,2,4", help="(default: 1,2,4)")
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        wide = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": LAYERS}
        zoo.CONFIGS["llama"] = {**zoo.CONFIGS["llama"], **wide, "layer_types": ["full_attention"] * LAYERS}
        zoo.save_checkpoint("llama", folder)
        for size in map(int, args.ranks.split(",")):
            ranks = RankProcesses(size, {"OUTCORE_CACHE": str(Path(scratch) / "cache")})
            for in_turn in (True, False) if size > 1 else (True,):
                found = ranks.run(timed, folder, args.tokens, args.rate * 1e6, in_turn)
                results.append({"ranks": size, "in_turn": in_turn, **found[0]})
            ranks.close()
    one = results[0]
    for r in results:
        how = "in turn" if r["in_turn"] else "in blocks"
        same = "same text" if r["tokens"] == one["tokens"] else "ANOTHER TEXT"
        share, first = r["token_s"] / one["token_s"], r["first_s"] / one["first_s"]
        print(
            f"{r['ranks']} ranks, {how}: {r['token_s']:.3f} s a token ({share:.2f}), "
            f"{r['first_s']:.3f} s to the first ({first:.2f}), {same}"
        )
    if args.json is not None:
        versions = {name: version(name) for name in ("mlx", "mlx-lm", "outcore")}
        command = ["benchmarks/rank_speed.py", *shown_arguments()]
        args.json.write_text(json.dumps({"versions": versions, "command": command, "results": results}, indent=1))
    return 0 if all(r["tokens"] == one["tokens"] for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
