"""What reading experts one by one is worth behind a slow disk: beside streaming whole layers, budget by budget.

    python benchmarks/experts.py MODEL --memory 45MB,60MB,75MB --disk 100MB --json benchmarks/results/experts-cpu.json

For each budget, in one run and in turns: `outcore generate` with experts read one by one, and with layers streamed
whole (``--experts 0``), behind a disk that gives so many bytes a second (a control group of version 1, `blkio`, which
takes root). The text must be the same; tokens per second, bytes read for a token, memory at the peak, and what `outcore
plan` predicts inside the same group.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from outcore.sizes import parse_size
from result_file import write_result
from serving import command
from slow_disk import slow_disk


def ran(words: list[str]) -> dict[str, Any]:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}: {done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def measured(group: Path | None, args: argparse.Namespace, memory: str, how: list[str], tokens: int) -> dict[str, Any]:
    """One way of holding the model within so much memory, for a text of so many tokens."""
    model = ["--model", str(args.model), "--memory", memory, *how, *args.engine.split()]
    text = args.text.read_text()[: args.characters]
    asked = ["--prompt", text, "--ignore-chat-template", "-m", str(tokens), "--draft", args.draft, "--temp", "0"]
    found = ran(command(group, "generate", *model, *asked, "--json"))
    length = ["--context", str(found["prompt_tokens"] + tokens), "--prompt-tokens", str(found["prompt_tokens"])]
    plan = ran(command(group, "plan", *model, *length, "--draft", "none", "--json"))
    sweeps = max(1, found["sweeps"] - 1)
    return {
        "memory": memory,
        "how": " ".join(how) or "chosen",
        "tokens_per_s": found["generation_tps"],
        "ttft_s": found["ttft_s"],
        "bytes_a_sweep": found["bytes_read"] // sweeps,
        "predicted_tps": plan["predicted_tps"],
        "expert_slots": found["expert_slots"],
        "hits": 1 - found["experts_read"] / found["experts_used"] if found["experts_used"] else None,
        "peak_share": found["peak_memory_bytes"] / found["budget_bytes"],
        "tokens": found["tokens"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--memory", required=True, help="budgets, with commas between them")
    parser.add_argument("--disk", help="bytes a second; as fast as it is where it is not given")
    parser.add_argument("--text", type=Path, required=True, help="of which the first characters are the prompt")
    parser.add_argument("--characters", type=int, default=600)
    parser.add_argument("--tokens", type=int, default=100, help="of an answer; of whole layers a fifth of that")
    parser.add_argument("--draft", default="none")
    parser.add_argument("--engine", default="", help="further flags of the engine")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rate = None if args.disk is None else parse_size(args.disk)
    rows = []
    with slow_disk(args.model, rate) as group, tempfile.TemporaryDirectory() as scratch:
        # What this disk gives, and how long layers take.
        os.environ["OUTCORE_CACHE"] = scratch
        ran(command(group, "calibrate", "--model", str(args.model), "--json"))
        for memory in args.memory.split(","):
            one_by_one = measured(group, args, memory, [], args.tokens)
            whole = measured(group, args, memory, ["--experts", "0"], args.tokens // 5)
            pair = one_by_one.pop("tokens"), whole.pop("tokens")
            same = all(a == b for a, b in zip(*pair, strict=False))
            times = one_by_one["tokens_per_s"] / whole["tokens_per_s"]
            rows.append({"one by one": one_by_one, "whole": whole, "same_text": same, "times": round(times, 2)})
            print(json.dumps(rows[-1], indent=1), flush=True)
    write_result(args.json, "experts", args.model, disk_bytes_per_s=rate, rows=rows)


if __name__ == "__main__":
    main()
