"""Planned peaks against real ones, and budgets against plans.

    python benchmarks/planned_peaks.py --prompts 1024,4096,16384 --json FILE
    python benchmarks/planned_peaks.py --filled qwen3,qwen3_5 --shapes qwen3.5-0.8b:8 --json FILE

Long prompts: tiny models of each kind, in float32 on random weights, each in a process of its own: dense, a hybrid of
recurrent and attention layers, sliding windows, and a dense one with quantized caches; streamed, and with everything
resident. What MLX held at most, freed memory that it keeps included, is to lie within the plan; what the process took
beyond what MLX held is to be the same for every prompt.

Filled contexts (``--filled``, ``--shapes``): models with budgets between the smallest and the one that keeps everything
resident. A prompt and its answer fill just the context that was planned for. Two ratios are shown: what is planned of
the budget, and what was used of the plan (active memory: freed memory that MLX keeps is not counted); and what both are
made of. A plan that uses less than 0.9 of its budget has to be one beside which no further piece of a layer fits.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx

import _support  # noqa: F401
import make_checkpoint
import outcore
import zoo
from outcore.decode.preparation import Preparation, prepare
from outcore.errors import PromptError
from outcore.machine.memory import peak_rss, rss
from outcore.plan.candidate import Candidate, Candidates
from outcore.plan.model_size import ModelSize
from outcore.plan.partition import held_between
from outcore.plan.plan import Plan
from outcore.plan.planner import ASSUMED, resident_budget
from outcore_experts.expert_plan import ON_DEMAND
from result_file import write_result
from stand_ins import TokensOnly

TOKENS = 4
ANSWER = 16
"""Tokens of an answer that fills a context."""

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
    with model.outcore as session:
        assert (session.streaming is None) == resident
        for _ in outcore.stream_generate(model, TokensOnly(), ids_of(prompt), max_tokens=TOKENS, **more):
            pass
        peak = mx.get_peak_memory() + mx.get_cache_memory()
        plan, process = session.plan, peak_rss()
        return Peak(
            kind, resident, prompt, plan.budget_bytes, plan.peak_bytes, peak, before, process,
            max(0, process - before - peak), plan.prefill_step,
        )  # fmt: skip


def ids_of(tokens: int) -> list[int]:
    return [3 + (7919 * i) % 100 for i in range(tokens)]


# Filled contexts


@dataclass(frozen=True)
class Filled:
    """A plan, and what was used of it while a prompt and its answer filled its context. Bytes.

    Attributes:
        at: where the budget lies between the smallest (0) and the one that keeps everything resident (1).
        of_budget: the plan's peak over its budget; ``further``: bytes of the largest piece of a streamed layer, or of
            the expert, that would fit beside it.
        active: the most that MLX held while it loaded, in the prompt, and in the answer, without freed memory that it
            keeps; ``of_plan``: that over the plan's peak.
        cached: the most of that freed memory.
        parts: what the plan's peak is made of, by name; ``used``: what was there: after loading (weights, slots and
            pools), in caches, and at most beside both in the prompt and in the answer.
    """

    model: str
    at: float
    context: int
    chunk: int
    slots: int
    budget: int
    planned: int
    active: int
    cached: int
    of_budget: float
    of_plan: float
    further: int
    parts: dict[str, int]
    used: dict[str, int]


def further(size: ModelSize, plan: Plan) -> int:
    """Bytes of the largest piece of a streamed layer, or of the expert, that could stay in memory beside all that does
    within the plan's budget; 0: none."""
    found = [0]
    if plan.pools:
        for n, (i, slots) in enumerate(plan.pools):
            experts = size.layers[i].experts
            if experts is not None and slots < experts.count:
                pools = [*plan.pools[:n], (i, slots + 1), *plan.pools[n + 1 :]]
                if ON_DEMAND.with_pools(size, plan, pools, ASSUMED).peak_bytes <= plan.budget_bytes:
                    found.append(experts.resident)
        return max(found)
    kept = dict(plan.kept)
    for i in plan.streamed:
        pieces = size.layers[i].pieces
        left = [n for n in range(len(pieces)) if n not in kept.get(i, ()) and pieces[n].resident]
        for n in left:
            more = kept | {i: tuple(sorted((*kept.get(i, ()), n)))}
            resident = frozenset(plan.resident)
            if len(left) == 1:
                del more[i]
                resident |= {i}
            stay = tuple(sorted(more.items()))
            wider = Candidate(
                Candidates(size), resident, plan.head_streamed, plan.prefill_step, plan.slots, plan.unit_bytes, stay
            )
            if wider.peak <= plan.budget_bytes:
                found.append(pieces[n].resident)
    return max(found)


def fill(model: str, folder: Path, at: float, prepared: Preparation, **options: Any) -> Filled:
    """Load with the budget that lies at ``at``, fill the planned context, and see."""
    gc.collect()
    least, most = prepared.planning.smallest, resident_budget(prepared.profile.size)
    if options["prefill_step_size"]:
        # With other chunks than those everything resident was counted with.
        most = max(most, least + sum(layer.resident for layer in prepared.profile.size.layers))
    budget = int(least + at * (most - least))
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    loaded_model, _ = outcore.load_model(folder, memory=budget, govern=False, **options)
    with loaded_model.outcore as session:
        plan, size = session.plan, session.size
        loading, loaded = mx.get_peak_memory() - before, mx.get_active_memory() - before
        mx.reset_peak_memory()
        prompt = held = cached = 0
        ids = ids_of(plan.context - ANSWER)
        for _ in outcore.stream_generate(loaded_model, TokensOnly(), ids, max_tokens=ANSWER):
            if not prompt:
                prompt = mx.get_peak_memory() - before
                mx.reset_peak_memory()
            cached = max(cached, mx.get_cache_memory())
            held = mx.get_active_memory() - before
        answer = mx.get_peak_memory() - before
    active = max(loading, prompt, answer)
    parts = {
        "weights": plan.weight_bytes,
        "slots": plan.slots * plan.slot_bytes,
        "pools": plan.pool_bytes,
        "caches": plan.cache_bytes,
        **size.activation_parts(plan.prefill_step, held_between(size.layers, plan.parts)),
        "allocator": plan.allocator_bytes,
    }
    parts["copies"] = plan.peak_bytes - sum(parts.values())
    used = {"loaded": loaded, "caches": held - loaded, "prompt": prompt - held, "answer": answer - held}
    return Filled(
        model, at, plan.context, plan.prefill_step, plan.slots, plan.budget_bytes, plan.peak_bytes, active, cached,
        round(plan.peak_bytes / plan.budget_bytes, 3), round(active / plan.peak_bytes, 3), further(size, plan),
        {name: n for name, n in parts.items() if n}, used,
    )  # fmt: skip


def filled(model: str, folder: Path, budgets: str, context: int, chunk: int | None, dtype: str | None) -> list[Filled]:
    """Of one model, at each of the budgets with which something is streamed."""
    options: dict[str, Any] = {"context": context, "prompt": context - ANSWER, "draft": "none", "dtype": dtype}
    options["prefill_step_size"] = chunk
    prepared = prepare(folder, memory=1, least=True, **options)
    return [fill(model, folder, float(at), prepared, **options) for at in budgets.split(",")]


def folders(root: Path, filled: str, shapes: str) -> Iterator[tuple[str, Path]]:
    """Checkpoints to fill contexts of: folders, tiny models of mlx-lm's types, and published shapes with their bits."""
    for name in filter(None, filled.split(",")):
        folder = Path(name)
        yield name, folder if (folder / "config.json").exists() else zoo.save_checkpoint(name, root / name)
    for name in filter(None, shapes.split(",")):
        shape, _, bits = name.partition(":")
        with contextlib.redirect_stdout(sys.stderr):
            status = make_checkpoint.main([shape, str(root / name), *(["--bits", bits] if bits else [])])
        assert not status, f"{name} was not made"
        yield name, root / name


def show(row: Filled) -> None:
    mb = {name: round(n / 1e6, 1) for name, n in row.parts.items()}, {k: round(n / 1e6, 1) for k, n in row.used.items()}
    print(
        f"{row.model} at {row.at}, chunk {row.chunk}, {row.slots} slots: {row.budget / 1e6:.1f} MB, planned "
        f"{row.of_budget:.2f} of it (further {row.further / 1e6:.2f}), used {row.of_plan:.2f} of that "
        f"({row.active / 1e6:.1f} and {row.cached / 1e6:.1f} cached)\n    planned {mb[0]}\n    used {mb[1]}",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Planned peaks against real ones, and budgets against plans.")
    parser.add_argument("--prompts", default="1024,4096,16384")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--filled", default="", help="folders, or types of mlx-lm's; every: all that run here")
    parser.add_argument(
        "--shapes", default="", help="shapes of make_checkpoint.py with their bits, like qwen3.5-0.8b:8"
    )
    parser.add_argument("--budgets", default="0.02,0.5,0.9")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--chunks", default="0", help="tokens of a prompt at a time; 0: as planned")
    parser.add_argument("--dtype")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        kind, folder, prompt, resident = args.one
        print(json.dumps(asdict(run(kind, Path(folder), int(prompt), resident == "resident"))))
        return 0
    if args.filled or args.shapes:
        return fill_all(args)
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


def fill_all(args: argparse.Namespace) -> int:
    rows: list[Filled] = []
    with tempfile.TemporaryDirectory() as root:
        names = ",".join(zoo.RUNNABLE) if args.filled == "every" else args.filled
        for name, folder in folders(Path(root), names, args.shapes):
            for chunk in map(int, args.chunks.split(",")):
                try:
                    for row in filled(name, folder, args.budgets, args.context, chunk or None, args.dtype):
                        row = row if row.model != str(folder) else replace(row, model=folder.name)
                        rows.append(row)
                        show(row)
                except PromptError as error:  # a context beyond the model's positions
                    print(f"{name}: {error}", flush=True)
    streamed = [r for r in rows if r.slots]
    passed = [f"{r.model} at {r.at}" for r in rows if r.active + r.cached > r.planned]
    unused = [f"{r.model} at {r.at}" for r in streamed if r.of_budget < 0.9 and r.further]
    ratios = sorted(r.of_plan for r in streamed)
    shares = f"{ratios[0]:.2f} at least, {ratios[len(ratios) // 2]:.2f} the median"
    print(f"{len(streamed)} streamed: used of the plan {shares}")
    print(f"at least 0.9 of it: {sum(r >= 0.9 for r in ratios)}; plan passed by: {', '.join(passed) or 'none'}")
    print(f"less than 0.9 of the budget planned where a further piece fits: {', '.join(unused) or 'none'}")
    write_result(args.json, "filled_contexts", Path.cwd(), rows=[asdict(r) for r in rows])
    return 0


if __name__ == "__main__":
    sys.exit(main())
