"""All experts in pools beside mlx-lm's own resident model: seconds for a token, in turn; and what waiting costs.

    python benchmarks/expert_resident.py MODEL --memory 30GB [--rounds 4] [--json FILE]

Three ways: mlx-lm's model; pools that hold all experts, which wait for nothing; and the same pools as if they did not,
so that each layer's router is waited for and nothing is read. By mlx-lm's ``generate_step``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx_lm.utils
from mlx_lm.generate import generate_step

from outcore import load_model
from outcore.engine.pooled_switch import PooledSwitch
from result_file import write_result


def seconds(model: Any, tokens: int) -> tuple[float, list[int]]:
    """For a token after 8 to warm up, and all tokens."""
    found = []
    for n, (token, _) in enumerate(generate_step(mx.array(list(range(5, 21))), model, max_tokens=tokens + 8)):
        found.append(int(token))
        if n == 7:
            began = time.perf_counter()
    return (time.perf_counter() - began) / tokens, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--memory", required=True)
    parser.add_argument("--experts", type=int, required=True, help="of a layer, all of them")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    theirs, _ = mlx_lm.utils.load_model(args.model)
    model, _ = load_model(
        args.model, memory=args.memory, experts=args.experts, context=256, prompt=16, draft="none", govern=False
    )
    rows: list[dict[str, Any]] = []
    with model.outcore:
        waiting = patch.object(PooledSwitch, "stay", PooledSwitch.withdraw)
        for n in range(args.rounds + 1):
            theirs_s, expected = seconds(theirs, args.tokens)
            ours_s, found = seconds(model, args.tokens)
            pools = model.outcore.engine.experts
            look_ahead, pools.look_ahead = pools.look_ahead, None
            with waiting:
                pools.begin(None)
                waits_s, _ = seconds(model, args.tokens)
            pools.look_ahead = look_ahead
            if n:  # kernels are compiled in the first
                rows.append({"mlx_lm": theirs_s, "pools": ours_s, "waiting": waits_s, "equal": found == expected})
                print(rows[-1], flush=True)
    medians = {k: statistics.median(r[k] for r in rows) for k in ("mlx_lm", "pools", "waiting")}
    print({k: medians["mlx_lm"] / v for k, v in medians.items()})
    write_result(args.json, "expert_resident", args.model, rows=rows)


if __name__ == "__main__":
    main()
