"""A mixture of experts of real size with a planted routing: experts one by one beside whole layers, in one run.

    python benchmarks/make_checkpoint.py qwen3.5-35b-a3b MODEL --bits 4 --dtype float32
    python benchmarks/expert_shape.py MODEL --source SMALL --text TEXT --memory 8GB [--json FILE]

Random weights route at random, where every policy is as good as another. So the routers are replaced: which experts a
token uses is taken from a small trained model (``--source``, a folder) reading a TEXT. Each of its experts stands for
as many of the large one's as there are times more of them, of which each use takes some: those of its last use, more
often than not, or others, some of them more common than the rest (``--again``, Zipf). Tokens go through one by one
after a short prompt. Told are seconds for a token, hits, and bytes read beside misses times an expert's bytes.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.utils
import numpy as np
import numpy.typing as npt
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

from expert_hits import trace_of
from outcore import load_model
from result_file import write_result


def planted(source: npt.NDArray[np.int64], of: int, layers: int, experts: int, used: int, again: float) -> Any:
    """Experts of each layer and token, (layers, tokens, used), after a small model's (layers, tokens, used)."""
    rng = np.random.default_rng(0)
    times, each = experts // of, used // source.shape[2]
    found = np.zeros((layers, source.shape[1], used), np.int64)
    common = 1 / np.arange(1, times + 1)
    for layer in range(layers):
        # Layers that follow the same one of the small model read different stretches of the text.
        trace = np.roll(source[layer % len(source)], 97 * (layer // len(source)), axis=0)
        last: dict[int, npt.NDArray[np.int64]] = {}
        shares = {e: rng.permutation(common / common.sum()) for e in range(of)}
        for t, call in enumerate(trace):
            parts = []
            for e in call.tolist():
                if e not in last or rng.random() > again:
                    last[e] = rng.choice(times, each, replace=False, p=shares[e])
                parts.append(e * times + last[e])
            found[layer, t] = np.concatenate(parts)
    return found


class Router(nn.Module):
    """In the place of a layer's router: the logits that choose what was planted, token by token."""

    def __init__(self, trace: npt.NDArray[np.int64], experts: int, foresight: float, ahead: Any) -> None:
        super().__init__()
        self._trace, self._experts, self._at = trace, experts, 0
        self._foresight, self._ahead, self._rng = foresight, ahead, np.random.default_rng(0)

    def __call__(self, x: mx.array) -> mx.array:
        tokens = x.shape[-2]
        logits = np.full((tokens, self._experts), -20.0, np.float32)
        rows = self._trace[self._at : self._at + tokens]
        if self._ahead is not None and self._ahead.asking:
            rows = rows.copy()
            for row in rows:
                wrong = np.flatnonzero(self._rng.random(len(row)) > self._foresight)
                # A trained model's mistakes are experts that it uses often.
                others = np.setdiff1d(self._trace[max(0, self._at - 32) : self._at + 1], row)
                if len(others) >= len(wrong):
                    row[wrong] = self._rng.choice(others, len(wrong), replace=False)
        else:
            self._at += tokens
        np.put_along_axis(logits, rows, np.linspace(1, 0.5, rows.shape[1], dtype=np.float32)[None], axis=1)
        return mx.array(logits).reshape(*x.shape[:-1], self._experts).astype(x.dtype)


def measured(
    folder: Path, trace: Any, experts: int, memory: str, how: dict[str, Any], tokens: int, foresight: float
) -> dict[str, Any]:
    """One way of holding it: seconds for a token after a prompt of 16 and some tokens to warm up."""
    began = time.perf_counter()
    how = dict(how)
    look = how.pop("look_ahead", True)
    model, _ = load_model(folder, memory=memory, context=512, prompt=16, draft="none", govern=False, **how)
    with model.outcore as session:
        pools = session.streaming.experts
        if pools is not None and not look:
            pools.look_ahead = None
        for n, layer in enumerate(model.layers):
            layer.mlp.gate = Router(trace[n], experts, foresight, None if pools is None else pools.look_ahead)
        cache, m = make_prompt_cache(model), session.metrics
        loaded = time.perf_counter()
        model(mx.array([list(range(5, 21))]), cache=cache)
        # Nobody wants the logits of a prompt's tokens.
        mx.eval([c.state for c in cache])
        first = time.perf_counter()
        warm = min(64, tokens // 2)
        for n in range(tokens):
            if n == warm:
                since, before = time.perf_counter(), counted(m)
            mx.eval(model(mx.array([[n % 100 + 3]]), cache=cache))
        seconds = (time.perf_counter() - since) / (tokens - warm)
        nbytes, used, read, foreseen, wasted, stall = (now - then for now, then in zip(counted(m), before, strict=True))
        size = next((e for x in session.size.layers if (e := x.experts) is not None), None)
        return {
            "plan": repr(session.plan), "load_s": loaded - began, "prompt_s": first - loaded, "token_s": seconds,
            "predicted_s": session.plan.token_s, "stall_s": stall / (tokens - warm),
            "bytes_a_token": nbytes / (tokens - warm), "hits": 1 - read / used if used else None,
            "foreseen": foreseen, "wasted": wasted, "read": read, "used": used,
            "bytes_times_misses": nbytes / ((read + foreseen) * size.read) if read and size else None,
            "peak_share": (mx.get_peak_memory() + mx.get_cache_memory()) / session.plan.budget_bytes,
        }  # fmt: skip


def counted(m: Any) -> tuple[float, ...]:
    return m.bytes_read, m.experts_used, m.experts_read, m.experts_foreseen, m.experts_wasted, m.stall_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--memory", default="8GB")
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--whole", type=int, default=4, help="tokens with whole layers")
    parser.add_argument("--again", type=float, default=0.7)
    parser.add_argument("--foresight", type=float, default=0.78)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    small, _ = mlx_lm.utils.load_model(args.source)
    small.set_dtype(mx.float32)
    ids = mlx_lm.utils.load_tokenizer(args.source).encode(args.text.read_text())[: args.tokens + 16]
    source = trace_of(small, ids)
    switches = [m for m in small.modules() if isinstance(m, SwitchGLU | SwitchMLP)]
    of = max(m.weight.shape[0] for s in switches for m in s.modules() if "weight" in m)
    config = json.loads((args.model / "config.json").read_text())
    text = config.get("text_config") or config
    experts, used = text["num_experts"], text["num_experts_per_tok"]
    trace = planted(source, of, text["num_hidden_layers"], experts, used, args.again)
    del small, switches
    rows = []
    for how, tokens in (({}, args.tokens), ({"look_ahead": False}, args.tokens), ({"experts": 0}, args.whole)):
        gc.collect()
        mx.reset_peak_memory()
        rows.append({"how": how, **measured(args.model, trace, experts, args.memory, how, tokens, args.foresight)})
        print(json.dumps(rows[-1], indent=1), flush=True)
    print(f"{rows[2]['token_s'] / rows[0]['token_s']:.1f} times; {rows[1]['token_s'] / rows[0]['token_s']:.2f} ahead")
    write_result(args.json, "expert_shape", args.model, rows=rows)


if __name__ == "__main__":
    main()
