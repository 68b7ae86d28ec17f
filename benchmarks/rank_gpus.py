"""Seconds a token of one model on several ranks of one machine, each with a GPU or a core of its own, over sockets.

    python benchmarks/rank_gpus.py MODEL --ranks 1,2 --memory 3GB,1500MB --disk 500MB --json FILE -- --draft ngram

Reads of each rank are held to ``--disk`` by the reader, as ranks of one host share its disk. ``--memory``: of each
rank, one for each number of ranks or one for all. Texts are compared with those of the first row.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rank_hosts import PROMPT, ROOT
from result_file import write_result


def launched(ranks: int, disk: str, words: list[str], scratch: Path, cores: bool) -> dict[str, Any]:
    """One run; of a single rank without a launcher. ``cores``: each rank is kept to one of the processor."""
    limited = [sys.executable, str(ROOT / "benchmarks" / "limited_outcore.py"), disk]
    command = [*(["taskset", "-c", "0"] if cores else []), *limited, *words]
    if ranks > 1:
        # Where the launcher starts ``python -m outcore``, reads are limited.
        enter = scratch / "python"
        run = f"{'taskset -c $MLX_RANK ' if cores else ''}{' '.join(limited)}"
        enter.write_text(
            f'#!/bin/sh\nif [ "$2" = outcore ]; then shift 2; exec {run} "$@"; fi\nexec {sys.executable} "$@"\n'
        )
        enter.chmod(0o700)
        hosts = ["--hosts", ",".join(["local"] * ranks), "--python", str(enter)]
        command = [sys.executable, "-m", "outcore", "launch", *hosts, "--", *words]
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd=ROOT, env=environment)
    if done.returncode:
        print(done.stderr[-3000:], file=sys.stderr)
        return {"failed": done.returncode}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def shown(found: dict[str, Any]) -> dict[str, Any]:
    """What is kept of a run's JSON."""
    if "failed" in found:
        return found
    row = {name: found[name] for name in ("ttft_s", "sweeps", "bytes_read", "peak_memory_bytes", "resident_units")}
    return row | {"token_s": 1 / found["generation_tps"], "prompt_tokens": found["prompt_tokens"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--memory", default="1GB")
    parser.add_argument("--disk", default="0", help="bytes a second of each rank's reader; 0: as fast as they are")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--repeat-prompt", type=int, default=1, help="times that the prompt is said")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--cores", action="store_true", help="each rank has one core of the processor, and no GPU")
    parser.add_argument("--json", type=Path, metavar="FILE")
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args, more = parser.parse_args(sys.argv[1:end]), sys.argv[end + 1 :]
    counts = [int(n) for n in args.ranks.split(",")]
    memories = args.memory.split(",") * (len(counts) if "," not in args.memory else 1)
    rows: list[dict[str, Any]] = []
    first: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for _ in range(args.rounds):
            for n, memory in zip(counts, memories, strict=True):
                words = ["generate", "--model", str(args.model.resolve()), "--memory", memory, "-m", str(args.tokens)]
                words += ["-p", args.prompt * args.repeat_prompt, "--ignore-chat-template", "--json"]
                words += [*(["--cpu-streams", "1"] if args.cores else []), *(more or ["--draft", "none"])]
                found = launched(n, args.disk, words, Path(scratch), args.cores)
                first = first or found
                row = {"ranks": n, "memory": memory, **shown(found)}
                if "tokens" in found and "tokens" in first:
                    row |= {"equal": found["tokens"] == first["tokens"]}
                    row["of_first"] = row["token_s"] * first["generation_tps"]
                rows.append(row)
                print(json.dumps(row), flush=True)
                write_result(args.json, "rank_gpus", args.model, disk=args.disk, more=more, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
