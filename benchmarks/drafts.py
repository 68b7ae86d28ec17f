"""Every way to draft behind a limited disk, and what ``auto`` takes of them: tokens a second, one process each.

    python benchmarks/drafts.py MODEL --text FILE --shares 60,75,90 --disk 6MB --drafts none,ngram,self:2,copy:2 \
        --json FILE
    python benchmarks/drafts.py MODEL --text FILE --percent 60,75,90 --drafts none,ngram,self:2,auto --json FILE

``--shares``: as many layers stay whole as make up such a share of the layers' bytes together with the weights that
draft; what else is in memory (states, logits) is not counted, which a small model has far too much of. ``--percent``:
budgets that count everything: so much of the weights, and what a plan needs beside them where everything stays. The
machine is calibrated behind the limited disk first; give OUTCORE_CACHE a folder of its own for each rate, as what was
measured behind another one is not measured again. ``--fresh``: nothing is calibrated, each process begins with an empty
cache, and its first text counts. ``copy:N``: as ``self:N``
was before high bits were shared: all of a streamed layer's codes are read. The disk is limited by a control group of
version 1 (`blkio`), which needs root. Greedy, pieces of held-out text; the first of them is not counted. Texts are
compared with those of ``none``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import mlx.core as mx

import _support  # noqa: F401
import outcore
from outcore.checkpoint.find_model import resolve_model
from outcore.checks import parse_size
from outcore.decode.preparation import prepare
from outcore.plan.planner import resident_budget
from outcore_drafts import self_draft
from result_file import write_result
from slow_disk import slow_disk

PROMPT = 128


def plenty(model: Path) -> int:
    """Bytes of ``--memory`` that any plan of a model has room in."""
    return 400_000_000 + 3 * sum(file.stat().st_size for file in model.glob("*.safetensors"))


def budget_of(model: Path, share: float, options: dict[str, Any]) -> int:
    """Bytes of ``--memory`` where so much of the weights has room."""
    size = prepare(model, draft="none", memory=plenty(model), **options).profile.size
    weights = size.non_layer + sum(layer.resident for layer in size.layers)
    return round(resident_budget(size) - (1 - share) * weights)


def within(group: Path | None, words: list[str]) -> list[str]:
    """A command, in that control group."""
    return words if group is None else ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh", *words]


def whole_layers(model: Path, draft: str, share: float, options: dict[str, Any]) -> int | None:
    """Layers that stay whole where so much of the layers' bytes is held; None: not even the draft has room."""
    plain = prepare(model, draft="none", **options).profile.size.layers
    room = share * sum(layer.resident for layer in plain)
    kind, _, bits = draft.partition(":")
    each = plain[0].resident
    if kind in ("self", "copy"):
        prepared = prepare(model, draft=f"self:{bits}", **options)
        assert prepared.draft is not None
        room -= prepared.draft.weights
        if kind == "self":
            each = prepared.profile.size.layers[0].resident
    return int(room // each) if room >= 0 else None


def run(model: Path, draft: str, memory: int, resident: int | None, args: argparse.Namespace) -> dict[str, Any]:
    """One way to draft, in this process."""
    options = options_of(args) | {"resident": resident}
    kind, _, bits = draft.partition(":")
    if kind == "copy":
        vars(self_draft)["nested"] = lambda profile, *_: profile
        draft = f"self:{bits}"
    planned = prepare(model, memory=memory, draft=draft, **options)
    predicted = 1 / planned.choice.token_s if planned.choice is not None else None
    began = time.perf_counter()
    loaded, tokenizer = outcore.load(str(model), memory=memory, draft=draft, govern=False, **options)
    load_s = time.perf_counter() - began
    text = tokenizer.encode(args.text.read_text())
    starts = [len(text) * (2 * i + 1) // (2 * args.prompts) for i in range(args.prompts)]
    made, seconds, answers = 0, 0.0, []
    with loaded.outcore as session:
        for n, start in enumerate(starts):
            found: list[int] = []
            for r in outcore.stream_generate(loaded, tokenizer, text[start - PROMPT : start], max_tokens=args.tokens):
                if not found:
                    first, sweeps, read = time.perf_counter(), session.metrics.sweeps, session.metrics.bytes_read
                found.append(r.token)
            answers.append(found)
            if n or args.fresh:
                made, seconds = made + len(found) - 1, seconds + time.perf_counter() - first
        return {
            "tps": made / seconds,
            "seconds": seconds,
            "load_s": load_s,
            "sweeps": (sweeps_s := session.metrics.sweeps - sweeps),
            "tokens_a_sweep": (len(found) - 1) / max(1, sweeps_s),
            "read_a_sweep": (session.metrics.bytes_read - read) / max(1, sweeps_s),
            "planned_read": session.plan.bytes_per_token,
            "whole": len(session.plan.resident),
            "drafting": session.drafting.name if session.drafting else None,
            "predicted_tps": predicted,
            "peak": mx.get_peak_memory(),
            "answers": answers,
        }


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    return {"dtype": args.dtype, "context": PROMPT + args.tokens, "prompt": PROMPT}


def disk_rate(text: str) -> int | None:
    return None if text == "0" else parse_size(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--shares", help="of the layers' bytes, percent")
    parser.add_argument("--percent", help="of the weights")
    parser.add_argument("--memory", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--drafts", default="none,ngram,copy:2,copy:3,self:2,self:3,auto")
    parser.add_argument("--disk", type=disk_rate, default=parse_size("6MB"), help="bytes a second; 0: as it is")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--child", metavar="DRAFT", help=argparse.SUPPRESS)
    parser.add_argument("--resident", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    model = resolve_model(args.model)
    if args.child is not None:
        print(json.dumps(run(model, args.child, int(args.memory), args.resident, args)))
        return 0
    rows: list[dict[str, Any]] = []
    shares = [float(s) / 100 for s in args.shares.split(",")] if args.shares else []
    budgets = [budget_of(model, float(s) / 100, options_of(args)) for s in (args.percent or "").split(",") if s]
    if budgets and not args.fresh:
        with slow_disk(model, args.disk) as group:
            words = [sys.executable, "-m", "outcore", "calibrate", str(model), "--dtype", args.dtype]
            subprocess.run(within(group, words), check=True, stdout=sys.stderr)
    for at in [*shares, *budgets]:
        plain = None
        for draft in args.drafts.split(","):
            row: dict[str, Any] = {"share" if at in shares else "memory": at, "draft": draft}
            memory, more = (
                (plenty(model), whole_layers(model, draft, at, {"memory": plenty(model)} | options_of(args)))
                if at in shares
                else (at, None)
            )
            if at in shares and more is None:
                rows.append(row | {"failed": "its weights have no room"})
                continue
            ours = [sys.executable, *sys.argv, "--child", draft, "--memory", str(memory)]
            ours += [] if more is None else ["--resident", str(more)]
            with slow_disk(model, args.disk) as group, tempfile.TemporaryDirectory() as cache:
                where = os.environ | ({"OUTCORE_CACHE": cache} if args.fresh else {})
                done = subprocess.run(within(group, ours), capture_output=True, text=True, env=where)
            if done.returncode:
                row |= {"failed": done.stderr.strip().splitlines()[-1]}
            else:
                row |= json.loads(done.stdout.splitlines()[-1])
                answers = row.pop("answers")
                plain = plain or answers
                row["equal"] = answers == plain
            rows.append(row)
            print(json.dumps(rows[-1]), flush=True)
            write_result(args.json, "drafts", model, disk=args.disk, dtype=args.dtype, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
