"""How many uses of routed experts find theirs in memory: Outcore's policy, LRU, and the best that there could be.

    python benchmarks/expert_hits.py MODEL TEXT [TEXT ...] [--tokens 2500] [--json FILE]

MODEL is a folder; each TEXT a file. Which experts its tokens use is noted from mlx-lm's resident model, and replayed
with slots for 10, 25 and 50 % of the experts: LRU over all layers together (and layer by layer), Outcore's policy, and
Belady's, which knows the future. With ``--engine`` tokens, the engine runs over so many of each text, one by one, and
its counters are compared with what the policy's replay counts.
"""

from __future__ import annotations

import argparse
import bisect
import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.utils
import numpy as np
import numpy.typing as npt
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

from outcore import load_model
from outcore_experts.expert_policy import ExpertPolicy
from result_file import write_result

SHARES = (0.1, 0.25, 0.5)

Trace = npt.NDArray[np.int64]
"""(layers, tokens, experts of a token)."""


def trace_of(model: Any, ids: list[int]) -> Trace:
    """Which experts each token of a text uses, in every layer that has some."""
    switches = [m for m in model.modules() if isinstance(m, SwitchGLU | SwitchMLP)]
    found: dict[int, list[Any]] = {id(s): [] for s in switches}
    originals = {cls: cls.__call__ for cls in {type(s) for s in switches}}

    def noted(self: Any, x: mx.array, indices: mx.array) -> mx.array:
        found[id(self)].append(np.array(indices).reshape(-1, indices.shape[-1]))
        return originals[type(self)](self, x, indices)

    for cls in originals:
        cls.__call__ = noted
    try:
        cache = make_prompt_cache(model)
        for begin in range(0, len(ids), 250):
            mx.eval(model(mx.array(ids[begin : begin + 250])[None], cache=cache))
    finally:
        for cls, original in originals.items():
            cls.__call__ = original
    # In the order of calls, which is that of layers here.
    return np.stack([np.concatenate(calls) for calls in found.values() if calls]).astype(np.int64)


def lru(uses: list[tuple[int, int]], slots: int) -> int:
    """Hits of (layer, expert) in turn."""
    inside: OrderedDict[tuple[int, int], None] = OrderedDict()
    hits = 0
    for use in uses:
        hits += use in inside
        inside[use] = None
        inside.move_to_end(use)
        if len(inside) > slots:
            inside.popitem(last=False)
    return hits


def belady(uses: list[tuple[int, int]], slots: int) -> int:
    """Hits where the one that is used again last is given up, or not taken in at all."""
    whens: dict[tuple[int, int], list[int]] = {}
    for n, use in enumerate(uses):
        whens.setdefault(use, []).append(n)
    inside: dict[tuple[int, int], int] = {}
    hits = 0
    for n, use in enumerate(uses):
        later = whens[use]
        at = bisect.bisect_right(later, n)
        again = later[at] if at < len(later) else len(uses)
        if use in inside:
            hits += 1
        elif len(inside) >= slots:
            last = max(inside, key=lambda u: inside[u])
            if inside[last] <= again:
                continue
            del inside[last]
        inside[use] = again
    return hits


def share_of(slots: int, layers: int) -> list[int]:
    """Slots of each layer."""
    return [slots // layers + (i < slots % layers) for i in range(layers)]


def ours(trace: Trace, experts: int, slots: list[int]) -> int:
    """Hits of the policy, each layer by itself."""
    hits = 0
    for calls, count in zip(trace, slots, strict=True):
        policy = ExpertPolicy(experts, count)
        for call in calls:
            policy.used(call[None])
            for group in policy.groups(set(call.tolist())):
                hits += len(group.experts) - len(group.loads)
                policy.placed(group.loads)
    return hits


def engine(folder: Path, ids: list[int], slots: int, dtype: str | None) -> tuple[int, int]:
    """Uses, and hits, that the engine counts with so many slots a layer."""
    model, _ = load_model(folder, memory="4GB", experts=slots, dtype=dtype, context=len(ids) + 1, govern=False)
    with model.outcore as session:
        cache = make_prompt_cache(model)
        for token in ids:
            mx.eval(model(mx.array([[token]]), cache=cache))
        return session.metrics.experts.used, session.metrics.experts.used - session.metrics.experts.read


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("texts", nargs="+", type=Path)
    parser.add_argument("--tokens", type=int, default=2500)
    parser.add_argument("--engine", type=int, default=0, metavar="N")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    model, _ = mlx_lm.utils.load_model(args.model)
    model.set_dtype(getattr(mx, args.dtype))
    tokenizer = mlx_lm.utils.load_tokenizer(args.model)
    stacked = [m for s in model.modules() if isinstance(s, SwitchGLU | SwitchMLP) for m in s.modules() if "weight" in m]
    experts = max(m.weight.shape[0] for m in stacked)
    rows = []
    for file in args.texts:
        ids = tokenizer.encode(file.read_text())[: args.tokens]
        trace = trace_of(model, ids)
        layers, _, used = trace.shape
        uses = [(i, int(e)) for t in range(trace.shape[1]) for i in range(layers) for e in trace[i, t]]
        for share in SHARES:
            slots = int(share * experts * layers)
            each = share_of(slots, layers)
            row: dict[str, Any] = {
                "text": file.name, "tokens": len(ids), "share": share, "experts": experts, "used": used,
                "lru": lru(uses, slots) / len(uses),
                "lru by layer": sum(
                    lru([(i, int(e)) for e in trace[i].ravel()], n) for i, n in enumerate(each)
                ) / len(uses),
                "outcore": ours(trace, experts, each) / len(uses),
                "belady": belady(uses, slots) / len(uses),
            }  # fmt: skip
            row["misses, times LRU's"] = (1 - row["outcore"]) / (1 - row["lru"])
            if args.engine:
                count = max(1, slots // layers)
                counted_uses, hits = engine(args.model, ids[: args.engine], count, args.dtype)
                row["engine"] = hits / counted_uses
                row["replayed"] = ours(trace[:, : args.engine], experts, [count] * layers) / counted_uses
            rows.append(row)
            print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}), flush=True)
    write_result(args.json, "expert_hits", args.model, rows=rows)


if __name__ == "__main__":
    main()
