"""Seconds a token of one model on several hosts: ``outcore launch`` over a network, behind disks that are really slow.

    python benchmarks/rank_hosts.py MODEL --rates 20,20 [--rates 20,60] [--delay 1ms --link 1gbit] --json FILE
    python benchmarks/rank_hosts.py MODEL --rates 20,20 --memory 40MB --all --draft ngram
    python benchmarks/rank_hosts.py MODEL --rates 20,20 --tokens 96 --draft self:3 -- --dtype float32
    python benchmarks/rank_hosts.py MODEL --rates 20,20 --batch 8
    python benchmarks/rank_hosts.py MODEL --rates 20,20,20,20 --layout blocks --by-hand

Hosts are network namespaces (``namespaces``), each with a control group of its own that holds its reads to so many
MB/s (`blkio`); with ``--delay`` or ``--link`` what joins them is late and slow (``slow_wire``). One rank alone, at the
first rate, is what the others are compared with, with the same draft. Nothing stays in memory but with ``--all``: then
the plan decides. With ``--cores`` each host has one of the processor, as ranks share none elsewhere.
With ``--batch`` as many texts share sweeps (``outcore batch``), and seconds are those of all tokens,
prompts included. Linux, as root.

Each row has the seconds that were foreseen, too. `blkio` lets the short reads of a calibration pass faster than the
long ones of a run, so with ``--by-hand`` the calibration's rate of the disk is set to what it is held to.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from namespaces import Namespace, namespaces
from result_file import write_result
from slow_disk import GROUPS
from slow_wire import slow_wire

ROOT = Path(__file__).resolve().parents[1]
OUTPUT = "answers.jsonl"
NAMES = "lines", "file", "[line", "list(", "None", "path", "sorted(", "''.join("
PROMPT = "def read_lines(path):\n    with open(path) as file:\n        return "


@contextlib.contextmanager
def folder_of(given: Path | None) -> Iterator[Path]:
    """One that was named, or a temporary one."""
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given.resolve()
        return
    with tempfile.TemporaryDirectory() as made:
        yield Path(made)


@contextlib.contextmanager
def slow_disks(folder: Path, rates: Sequence[float]) -> Iterator[list[Path]]:
    """A control group for each rank; MB/s."""
    device = folder.stat().st_dev
    groups = [GROUPS / f"outcore-rank-{os.getpid()}-{n}" for n in range(len(rates))]
    try:
        for group, rate in zip(groups, rates, strict=True):
            group.mkdir()
            limit = f"{os.major(device)}:{os.minor(device)} {round(rate * 1e6)}"
            (group / "blkio.throttle.read_bps_device").write_text(limit)
        yield groups
    finally:
        for group in groups:
            for _ in range(100):
                with contextlib.suppress(FileNotFoundError, OSError):
                    group.rmdir()
                if not group.exists():
                    break
                time.sleep(0.1)


UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "kbit": 125.0, "mbit": 125e3, "gbit": 125e6}


def number(text: str) -> float:
    """``1ms`` in seconds, ``1gbit`` in bytes a second."""
    digits = text.rstrip("abcdefghijklmnopqrstuvwxyz")
    return float(digits) * UNITS[text[len(digits) :]]


@contextlib.contextmanager
def joined(ranks: int, delay: str | None, link: str | None) -> Iterator[list[Namespace]]:
    """Hosts, and what joins them."""
    slow = bool(delay or link)
    with namespaces(ranks, cables=not slow) as hosts, contextlib.ExitStack() as stack:
        if slow:
            stack.enter_context(slow_wire(hosts, number(delay or "0s") / 2, number(link or "1000gbit")))
        yield hosts


def write_requests(path: Path, count: int, prompt: str, tokens: int) -> None:
    """As many requests, of texts that differ in their last words."""
    lines = [
        {
            "custom_id": str(n),
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": f"{prompt}{name}", "max_tokens": tokens, "temperature": 0},
        }
        for n, name in zip(range(count), itertools.cycle(NAMES), strict=False)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def answers(path: Path) -> dict[str, str]:
    """The text of each request's answer."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return {line["custom_id"]: line["response"]["body"]["choices"][0]["text"] for line in found}


def of_batch(found: dict[str, Any], output: Path) -> dict[str, Any]:
    return {
        "token_s": found["seconds"] / found["generation_tokens"],
        "generated": found["generation_tokens"],
        "sweeps": found["sweeps"],
        "tokens": answers(output),
    }


def measured(command: list[str], environment: dict[str, str], output: Path | None) -> dict[str, Any]:
    """What a run tells, of one text or, with a file of answers, of several."""
    done = subprocess.run(
        command, env={**os.environ, **environment}, stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd=ROOT
    )
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-3:]}
    found = json.loads(done.stdout.splitlines()[-1])
    if output is not None:
        return of_batch(found, output)
    return {
        "token_s": 1 / found["generation_tps"],
        "first_s": found["prompt_tokens"] / found["prompt_tps"],
        "prompt_tokens": found["prompt_tokens"],
        "draft": found["draft"],
        "drafted": found["drafted_tokens"],
        "accepted": found["accepted_tokens"],
        "sweeps": found["sweeps"],
        "tokens": found["tokens"],
        **_foreseen(found),
    }


def _foreseen(found: dict[str, Any]) -> dict[str, Any]:
    """What was foreseen, and how far off that was: less than 0 is too fast."""
    if (shared := found.get("shared")) is None:
        return {}
    token_s, first_s = shared["predicted_token_s"], shared["predicted_ttft_s"]
    return {
        "layers": [part["layers"] for part in shared["ranks"]],
        "resident": [part["resident"] for part in shared["ranks"]],
        "latency_s": shared["latency_s"],
        "link_bytes_per_s": shared["link_bytes_per_s"],
        "calibrated": shared["calibrated"],
        "predicted_token_s": token_s,
        "predicted_first_s": first_s,
        "off": token_s * found["generation_tps"] - 1,
        "off_first": first_s / found["prompt_tokens"] * found["prompt_tps"] - 1,
    }


def computed_as(flags: Sequence[str]) -> list[str]:
    """Of a command's flags, with their values, those that a calibration depends on."""
    taken = {"--dtype", "--cpu-streams"}
    return [word for pair in itertools.pairwise(flags) if pair[0] in taken for word in pair]


def set_rate(cache: Path, rate: float) -> None:
    """Have the calibration say what the disk is held to; MB/s."""
    (path,) = (cache / "calibration").glob("*.json")
    document = json.loads(path.read_text())
    document["calibration"] |= {"read_gbps": rate / 1000}
    path.write_text(json.dumps(document))


def alone(cache: Path, group: Path, words: list[str], core: str = "") -> list[str]:
    """A command of Outcore in a control group."""
    script = f'export OUTCORE_CACHE={cache}; echo $$ > {group}/cgroup.procs; exec {core} "$@"'
    return ["sh", "-c", script, "sh", sys.executable, "-m", "outcore", *words]


def on_hosts(
    rates: Sequence[float], words: list[str], args: argparse.Namespace, scratch: Path, folder: Path
) -> dict[str, Any]:
    """One run; of a single rank without a launcher. Each rank is calibrated behind its disk first."""
    environment = {"PYTHONPATH": str(ROOT / "src")}
    output = scratch / OUTPUT if args.batch else None
    with slow_disks(folder, rates) as groups, joined(len(rates), args.delay, args.link) as hosts:
        enter = scratch / "python"
        lines = [
            f"{n}) export OUTCORE_CACHE={scratch}/{rate:g}; echo $$ > {group}/cgroup.procs || exit 1;;"
            for n, (rate, group) in enumerate(zip(rates, groups, strict=True))
        ]
        core = f"taskset -c $((MLX_RANK % {os.cpu_count()})) " if args.cores else ""
        python = core + shlex.quote(sys.executable)
        lines = ["#!/bin/sh", "case $MLX_RANK in", *lines, "esac"]
        if args.layout:
            layout = f"{shlex.quote(str(ROOT / 'benchmarks' / 'rank_layout.py'))} {args.layout}"
            lines.append(f'if [ "$1 $2" = "-m outcore" ]; then shift 2; exec {python} {layout} "$@"; fi')
        enter.write_text("\n".join([*lines, f'exec {python} "$@"', ""]))
        enter.chmod(0o700)
        for rate, group in zip(rates, groups, strict=True):
            if not (scratch / f"{rate:g}").exists():
                calibrate = alone(scratch / f"{rate:g}", group, ["calibrate", str(folder), *computed_as(args.more)])
                subprocess.run(calibrate, check=True, stdout=sys.stderr)
                if args.by_hand:
                    set_rate(scratch / f"{rate:g}", rate)
        if len(rates) == 1:
            one = alone(scratch / f"{rates[0]:g}", groups[0], words, "taskset -c 0" if args.cores else "")
            return measured(one, environment, output)
        hostfile = scratch / "hosts.json"
        hostfile.write_text(json.dumps([{"ssh": host.name, "ips": [host.address]} for host in hosts]))
        launch = ["launch", "--hostfile", str(hostfile), "--python", str(enter)]
        launch += ["--ssh", f"{sys.executable} {ROOT / 'benchmarks' / 'namespaces.py'}"]
        launch += [a for name, value in environment.items() for a in ("--env", f"{name}={value}")]
        start = [sys.executable, "-m", "outcore", *launch, "--"]
        if args.calibrated:
            plan = [
                "plan",
                "--model",
                str(folder.resolve()),
                "--memory",
                args.memory,
                "--draft",
                args.draft,
                *args.more,
            ]
            subprocess.run([*start, *plan], env={**os.environ, **environment}, check=True, stdout=sys.stderr, cwd=ROOT)
        return measured([*start, *words], environment, output)


def command_of(args: argparse.Namespace, scratch: Path) -> list[str]:
    """The command of Outcore that is run."""
    how = ["--model", str(args.model.resolve()), "--memory", args.memory, "-m", str(args.tokens), "--json", *args.more]
    how += [] if args.all else ["--resident", "0"]
    if args.batch:
        requests = scratch / "requests.jsonl"
        write_requests(requests, args.batch, args.prompt, args.tokens)
        return ["batch", *how, "--input", str(requests), "--output", str(scratch / OUTPUT), "--overwrite"]
    return ["generate", *how, "-p", args.prompt, "--ignore-chat-template", "--draft", args.draft]


def vars_of(args: argparse.Namespace) -> dict[str, Any]:
    """What of the arguments a result tells."""
    names = (
        "delay",
        "link",
        "memory",
        "all",
        "cores",
        "tokens",
        "draft",
        "batch",
        "layout",
        "by_hand",
        "calibrated",
        "more",
    )
    return {name: getattr(args, name) for name in names}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rates", action="append", required=True, help="MB/s of each rank's disk, with commas")
    parser.add_argument("--delay", help="there and back, such as 1ms (default: none)")
    parser.add_argument("--link", help="bits a second, such as 1gbit (default: no limit)")
    parser.add_argument("--memory", default="200MB", help="of each rank (default: 200MB)")
    parser.add_argument("--all", action="store_true", help="what has room stays in memory")
    parser.add_argument("--cores", action="store_true", help="each host has one core of this processor")
    parser.add_argument("--layout", choices=["alternate", "blocks"], help="of layers (default: as is fastest)")
    parser.add_argument("--by-hand", action="store_true", help="take --rates for what disks were measured to do")
    parser.add_argument("--calibrated", action="store_true", help="have ranks measure what each computes first")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="a folder to keep calibrations in, for the next time")
    parser.add_argument("--tokens", type=int, default=12)
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--draft", default="none", help="of one rank and of several (default: none)")
    parser.add_argument("--batch", type=int, default=0, metavar="N", help="so many texts that share sweeps")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.usage = f"{parser.format_usage().removeprefix('usage: ').rstrip()} [-- FLAGS of outcore generate, or batch]"
    own = sys.argv[1:]
    at = own.index("--") if "--" in own else len(own)
    args = parser.parse_args(own[:at])
    args.more = own[at + 1 :]
    rows: list[dict[str, Any]] = []
    with folder_of(args.keep) as scratch:
        words = command_of(args, scratch)
        several = [[float(rate) for rate in rates.split(",")] for rates in args.rates]
        for rates in [several[0][:1], *several]:
            row = on_hosts(rates, words, args, scratch, args.model)
            tokens = row.pop("tokens", None)
            rows.append({"rates": rates, **row})
            if len(rows) == 1:
                alone = tokens
            if "token_s" in row and "token_s" in rows[0]:
                rows[-1] |= {"equal": tokens == alone, "of_one": row["token_s"] / rows[0]["token_s"]}
                if "first_s" in row:
                    rows[-1]["of_one_first"] = row["first_s"] / rows[0]["first_s"]
            print(json.dumps(rows[-1]), flush=True)
            write_result(args.json, "rank_hosts", args.model, **vars_of(args), rows=rows)
    return 0


if __name__ == "__main__":
    # So that namespaces and groups go.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    sys.exit(main())
