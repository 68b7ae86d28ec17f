"""Drafts for a dense model of which a part is in memory, behind a slow disk: each fixed choice, and ``auto``.

    python benchmarks/padded.py MODEL PADDED --width 32960
    python benchmarks/dense_drafts.py PADDED --text code=FILE,prose=FILE --percent 15,30,50,75,90 \
        --drafts none,ngram,self:2,drafter:DIR,auto --json FILE

``--percent``: ``--memory`` as a share of the files' bytes. Each row is a process that begins with an empty cache and
writes all answers to the same prompts, pieces of held-out text, greedily; seconds are counted from each answer's first
token. Texts are compared with those of the model when all of it is in memory (``--reference``: of another folder, as
the model before it was padded, which is faster). The disk is held to a rate by the kernel
(``slow_disk``; needs root). As every pass without a draft takes the same time, ``none`` writes ``--plain`` tokens only.
Rows go to the JSON file one by one, in place of earlier ones of the same name, so that a table can be made in pieces;
without ``--drafts`` the table of that file is printed. ``auto`` finds a drafter in PADDED/drafter.
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
from drafts import PROMPT, disk_rate, plenty, within
from outcore.checkpoint.find_model import resolve_model
from outcore.checks import parse_size
from result_file import write_result
from slow_disk import slow_disk

WHOLE = "whole"


def answers(model: Path, draft: str, memory: int, file: Path, args: argparse.Namespace) -> dict[str, Any]:
    """All answers of one way to draft, in this process."""
    options: dict[str, Any] = {"dtype": args.dtype, "context": PROMPT + args.tokens, "prompt": PROMPT}
    if args.draft_bits and draft.partition(":")[0] in ("drafter", "auto"):
        options["draft_bits"] = args.draft_bits
    loaded, tokenizer = outcore.load(str(model), memory=memory, draft=draft, govern=False, **options)
    text, tokens = tokenizer.encode(file.read_text()), args.plain if draft == "none" else args.tokens
    texts: list[dict[str, Any]] = []
    with loaded.outcore as session:
        for i in range(args.prompts):
            start, found, first, passes = len(text) * (2 * i + 1) // (2 * args.prompts), list[int](), 0.0, 0
            for r in outcore.stream_generate(loaded, tokenizer, text[start - PROMPT : start], max_tokens=tokens):
                if not found:
                    first, passes = time.perf_counter(), session.metrics.sweeps
                found.append(r.token)
            passes, seconds = session.metrics.sweeps - passes, time.perf_counter() - first
            name = session.drafting.name if session.drafting else None
            each = {"seconds": seconds, "passes": passes, "whole": len(session.plan.resident), "drafting": name}
            texts.append(each | {"tokens": len(found) - 1, "answer": found})
            print(draft, {**each, "tokens": len(found) - 1}, file=sys.stderr, flush=True)
        seconds, passes, made = (sum(t[key] for t in texts) for key in ("seconds", "passes", "tokens"))
        return {
            "token_s": seconds / made,
            "tokens_a_pass": made / max(1, passes),
            "pass_s": seconds / max(1, passes),
            "memory": memory,
            "peak": mx.get_peak_memory(),
            "notes": [note for note in session.notes if "draft" in note],
            "texts": texts,
        }


def process(model: Path, draft: str, memory: int, name: str, args: argparse.Namespace) -> dict[str, Any]:
    """The same in a process of its own, behind the slow disk unless everything is in memory."""
    words = [
        sys.executable,
        sys.argv[0],
        str(model),
        *sys.argv[2:],
        "--child",
        "none" if draft == WHOLE else draft,
        "--memory",
        str(memory),
    ]
    words += ["--of", name] + (["--plain", str(args.tokens)] if draft == WHOLE else [])
    rate = None if draft == WHOLE else args.disk
    with slow_disk(model, rate) as group, tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(within(group, words), stdout=-1, text=True, env=os.environ | {"OUTCORE_CACHE": cache})
    return {"failed": True} if done.returncode else json.loads(done.stdout.splitlines()[-1])


def line(row: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    at = [row[key] for key in ("text", "percent", "draft")]
    if "failed" in row:
        return f"| {at[0]} | {at[1]} | {at[2]} | does not run |"
    same = {r["draft"]: r for r in rows if [r["text"], r["percent"]] == at[:2] and "failed" not in r}
    whole = next((r for r in rows if r["text"] == row["text"] and r["draft"] == WHOLE), None)
    equal = "" if whole is None else all(
        t["answer"] == w["answer"][: len(t["answer"])] for t, w in zip(row["texts"], whole["texts"], strict=True)
    )  # fmt: skip
    ratio = f"{same['none']['token_s'] / row['token_s']:.2f}" if "none" in same else ""
    best = min(r["token_s"] for r in same.values() if r["draft"] not in ("auto", WHOLE)) if len(same) > 1 else 0.0
    of_best = f"{best / row['token_s']:.2f}" if row["draft"] == "auto" else ""
    cells = [*at, f"{row['tokens_a_pass']:.2f}", f"{row['pass_s']:.2f}", f"{1 / row['token_s']:.3f}", ratio, of_best]
    used = f"{row['peak'] / 1e6:.1f} of {row['memory'] / 1e6:.1f}"
    return "| " + " | ".join(map(str, [*cells, used, equal, row["texts"][-1]["whole"]])) + " |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", required=True, help="NAME=FILE, several separated by commas")
    parser.add_argument("--percent", default="30", help="of the files' bytes")
    parser.add_argument("--drafts", default="")
    parser.add_argument("--draft-bits", type=int)
    parser.add_argument("--reference", help="a model with the same text; default: MODEL")
    parser.add_argument("--disk", type=disk_rate, default=parse_size("60MB"), help="bytes a second; 0: as it is")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--plain", type=int, default=6, help="tokens of each answer of none")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--json", type=Path, metavar="FILE", required=True)
    for hidden in ("--child", "--memory", "--of"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    args = parser.parse_args()
    model, files = resolve_model(args.model), dict(each.split("=", 1) for each in args.text.split(","))
    if args.child is not None:
        print(json.dumps(answers(model, args.child, int(args.memory), Path(files[args.of]), args)))
        return 0
    nbytes = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    rows: list[dict[str, Any]] = json.loads(args.json.read_text())["rows"] if args.json.exists() else []
    asked = [(name, int(p), d) for name in files for p in args.percent.split(",") for d in args.drafts.split(",") if d]
    needed = [(name, 0, WHOLE) for name in files if not any(r["draft"] == WHOLE and r["text"] == name for r in rows)]
    for name, percent, draft in needed + asked if asked else []:
        of = resolve_model(args.reference) if args.reference and draft == WHOLE else model
        found = process(of, draft, nbytes * percent // 100 or plenty(of), name, args)
        shown = "drafter" if "/" in draft else draft
        rows = [r for r in rows if (r["text"], r["percent"], r["draft"]) != (name, percent, shown)]
        rows.append({"text": name, "percent": percent, "draft": shown, **found})
        write_result(args.json, "dense_drafts", model, disk=args.disk, dtype=args.dtype, rows=rows)
    print("| text | % | draft | tokens a pass | s a pass | tok/s | times none | auto of best | MB | equal | whole |")
    print("|" + " --- |" * 11)
    for row in rows:
        print(line(row, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
