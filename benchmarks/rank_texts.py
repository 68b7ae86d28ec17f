"""Several texts of one model over ranks, of each a token in turn; run by ``rank_gpus.py`` in the place of ``generate``.

    LIM=benchmarks/rank_texts.py python benchmarks/rank_gpus.py MODEL --ranks 1,2 --memory 6GB --tokens 24 --json FILE

The tokens that are told are those of all texts together. Each text is written by itself afterwards, and has to come out
the same.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import mlx_lm.utils

import outcore
from outcore_cluster.environment import from_environment
from outcore_cluster.group import RankGroup

TEXTS = "The first text", "def read_lines(path):", "In 1815, at", "import numpy as np"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rate")
    parser.add_argument("command")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--memory", required=True)
    parser.add_argument("-m", type=int, dest="tokens", required=True)
    args, _ = parser.parse_known_args()
    link = from_environment() if "MLX_RANK" in os.environ else None
    own: dict[str, Any] = {} if link is None else {"ranks": RankGroup(link, host=link.host)}
    tokenizer = mlx_lm.utils.load_tokenizer(args.model)
    model, _ = outcore.load_model(args.model, memory=args.memory, draft="none", **own)
    with model.outcore as session:
        began = time.perf_counter()
        texts = [outcore.stream_generate(model, tokenizer, prompt, max_tokens=args.tokens) for prompt in TEXTS]
        rounds = []
        first_s = 0.0
        for row in zip(*texts, strict=False):
            rounds.append([r.token for r in row])
            first_s = first_s or time.perf_counter() - began
        seconds = time.perf_counter() - began - first_s
        del texts
        for n, prompt in enumerate(TEXTS):
            alone = [r.token for r in outcore.stream_generate(model, tokenizer, prompt, max_tokens=len(rounds))]
            assert alone == [row[n] for row in rounds], (n, alone, [row[n] for row in rounds])
        tokens = [token for row in rounds for token in row]
        found = {"tokens": tokens, "ttft_s": first_s, "generation_tps": (len(tokens) - len(TEXTS)) / seconds}
        found |= {
            "prompt_tokens": len(TEXTS),
            "sweeps": session.metrics.sweeps,
            "resident_units": len(session.plan.resident),
        }
        found |= {"bytes_read": session.metrics.bytes_read, "peak_memory_bytes": session.plan.peak_bytes}
    if link is None or link.rank == 0:
        print(json.dumps(found), flush=True)
    if link is not None:
        link.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
