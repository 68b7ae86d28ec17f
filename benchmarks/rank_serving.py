"""Clients of one `outcore serve` on several ranks, each behind a disk that is really slow.

    python benchmarks/rank_serving.py MODEL --rates 20,20 --clients 8 --json FILE

Ranks are processes of this machine (`outcore launch --hosts local,local`), each in a control group that holds its reads
to so many MB/s (`blkio`). Asked are a few clients one after the other, then all of them at once; without drafts,
nothing in memory. The same of one rank at the first rate, whose texts the others' have to be. Linux, as root.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rank_hosts import PROMPT, ROOT, alone, folder_of, slow_disks
from result_file import write_result
from serving import Clients


@contextmanager
def server(rates: Sequence[float], words: Sequence[str], scratch: Path, folder: Path) -> Iterator[str]:
    """`outcore serve` on so many ranks; its address."""
    with slow_disks(folder, rates) as groups:
        for rate, group in zip(rates, groups, strict=True):
            if not (scratch / f"{rate:g}").exists():
                calibrate = alone(scratch / f"{rate:g}", group, ["calibrate", str(folder)])
                subprocess.run(calibrate, check=True, stdout=sys.stderr)
        enter = scratch / "python"
        lines = [
            f"{n}) export OUTCORE_CACHE={scratch}/{rate:g}; echo $$ > {group}/cgroup.procs || exit 1;;"
            for n, (rate, group) in enumerate(zip(rates, groups, strict=True))
        ]
        enter.write_text(
            "\n".join(
                ["#!/bin/sh", "case $MLX_RANK in", *lines, "esac", f'exec {shlex.quote(sys.executable)} "$@"', ""]
            )
        )
        enter.chmod(0o700)
        serve = ["serve", str(folder), "--port", "0", *words]
        command = alone(scratch / f"{rates[0]:g}", groups[0], serve)
        if len(rates) > 1:
            hosts = ",".join(["local"] * len(rates))
            command = [
                sys.executable,
                "-m",
                "outcore",
                "launch",
                "--hosts",
                hosts,
                "--python",
                str(enter),
            ]
            command += ["--", *serve]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        try:
            assert process.stdout is not None
            found = re.search(r"http://\S+", process.stdout.readline())
            assert found is not None
            yield found[0]
        finally:
            process.send_signal(signal.SIGTERM)
            status = process.wait(60)
            assert status == 0, status


def measured(address: str, clients: int, tokens: int, first: int) -> dict[str, Any]:
    """Tokens a second of the ``first`` clients one after the other, and of all at once."""
    asking = Clients(address, tokens)
    prompts = [f"{PROMPT}{n}" for n in range(clients)]
    asking.ask(prompts[:1], 2)
    began = time.monotonic()
    texts = [asking.ask([prompt])["texts"][0] for prompt in prompts[:first]]
    one_by_one = first * tokens / (time.monotonic() - began)
    at_once = asking.ask(prompts)
    return {
        "one_by_one_tps": one_by_one,
        "at_once_tps": at_once["tokens_per_s"],
        "at_once_sweeps": at_once["sweeps"],
        "as_one_by_one": at_once["texts"][:first] == texts,
        "texts": at_once["texts"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rates", action="append", required=True, help="MB/s of each rank's disk, with commas")
    parser.add_argument("--memory", default="200MB", help="of each rank (default: 200MB)")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--first", type=int, default=2, help="clients that are asked one by one (default: 2)")
    parser.add_argument("--tokens", type=int, default=12)
    parser.add_argument("--keep", type=Path, help="folder for calibrations, which stay (default: one that goes)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    words = ["--memory", args.memory, "--resident", "0", "--draft", "none", "--prefix-cache", "off"]
    rows: list[dict[str, Any]] = []
    texts: list[str] = []
    with folder_of(args.keep) as scratch:
        several = [[float(rate) for rate in rates.split(",")] for rates in args.rates]
        for rates in [several[0][:1], *several]:
            with server(rates, words, scratch, args.model.resolve()) as address:
                row = measured(address, args.clients, args.tokens, args.first)
            found = row.pop("texts")
            texts = texts or found
            row |= {"rates": rates, "equal": found == texts}
            if rows:
                row |= {
                    f"{name}_of_one": row[f"{name}_tps"] / rows[0][f"{name}_tps"] for name in ("one_by_one", "at_once")
                }
            rows.append(row)
            print(json.dumps(row), flush=True)
            write_result(args.json, "rank_serving", args.model, clients=args.clients, tokens=args.tokens, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
