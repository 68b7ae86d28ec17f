"""Measures what a run does when memory gets short under it: same tokens, no kill, and speed after shedding.

    python benchmarks/under_pressure.py models/llama-4gb --json under-pressure.json

Every run is a process of its own in a control group of its own, page cache counted. Limits are ``OUTSIDE`` (Python, its
libraries, a tokenizer) and a share of the checkpoint's size: A, ``--high`` of it, and B, ``--low`` of it.

Scenarios
    lowered     a run with limit A; half way through, a writer lowers the limit to B, again and again while the kernel
                answers EBUSY. Beside it, in turn, a run planned for B from the start in a group with limit B: the
                time per token after the last shed or regrow against that run's, ``--rounds`` times, medians compared.
    neighbour   limit A; a second process in the group takes memory step by step until B is left, keeps it, frees it.
    cliff       limit A, ``--memory`` ``CLIFF`` below it: less is left than what Python alone takes.
    impossible  ``outcore generate`` with limit A, and a neighbour that takes all of it (``neighbour``), or a writer
                that lowers the limit to less than the smallest plan needs (``limit``).

Equal tokens are compared with a run of the same model without limit and without pressure. The disk's rate is measured
before and after each timed run, for a disk drifts: where it does, time is compared round by round.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

import benchmark
import pressed
from benchmark import SAME_OUTCORE, Failed, Result
from cgroup import Cgroup
from judge import table_of
from judge_pressure import judge
from outcore.sizes import format_size
from outcore_bench.disk import drop_page_cache
from pressures import Lowering, Neighbour, closing_all

OUTSIDE = 200_000_000
CLIFF = 8192
"""Bytes between a limit and a budget that was made without regard to it: a larger budget than the limit is refused."""
SETTLED = 5
"""Tokens at least that a speed after shedding is the median of."""
PROMPT = "Once upon a time"

OnToken = Callable[[int, Cgroup], None]
NOTHING: list[Neighbour] = []


class Bench(benchmark.Subject):
    """Runs a model in control groups, each run in a fresh process."""

    def __init__(self, folder: Path, options: Result, log: Console) -> None:
        super().__init__(folder, log)
        self.options = options

    def disk_gbps(self) -> float:
        """GB/s that the disk gives now."""
        done = subprocess.run(
            pressed.command("disk", {"folder": str(self.folder)}),
            capture_output=True,
            text=True,
            env=os.environ | SAME_OUTCORE,
        )
        if done.returncode:
            raise Failed(done.stderr.strip().splitlines()[-1])
        return float(json.loads(done.stdout.splitlines()[-1])["best_gbps"])

    def run(
        self,
        name: str,
        limit: int,
        on_token: OnToken = lambda _n, _g: None,
        others: list[Neighbour] = NOTHING,
        **options: Any,
    ) -> Result:
        """One run in a group with that limit; ``on_token`` is called after each token with their number.

        Args:
            others: neighbours that ``on_token`` brings into the group, ended with the run.
        """
        drop_page_cache(self.files)
        options = {"folder": str(self.folder)} | self.options | options
        self.log.print(f"{name} under {format_size(limit)}", highlight=False)
        lines: list[str] = []
        with Cgroup(f"outcore-pressure-{os.getpid()}", limit) as group, closing_all(others):
            process = subprocess.Popen(
                group.wrap(pressed.command("generate", options)),
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | SAME_OUTCORE,
            )  # fmt: skip
            assert process.stdout is not None and process.stderr is not None
            for line in process.stdout:
                lines.append(line)
                if "token" in (note := json.loads(line)):
                    self.log.print(
                        f"  token {note['token']}: {note['resident']} resident, {format_size(note['free'])} free",
                        highlight=False,
                    )
                    on_token(note["token"], group)
            errors = process.stderr.read().strip().splitlines()
            status = process.wait()
            result: Result = {
                "limit_bytes": limit, "exit": status, "killed": group.kills > 0 or status == -9,
                "cgroup_peak_bytes": group.peak_bytes,
            }  # fmt: skip
        if status == 0:
            return result | json.loads(lines[-1])
        self.log.print(f"  ended with {status}: {errors[-1] if errors else 'killed'}", highlight=False)
        return result | {"failed": "killed for memory" if result["killed"] else errors[-1] if errors else str(status),
                         "tokens_before": len(lines)}  # fmt: skip

    def command(self, name: str, limit: int, on_text: OnToken, others: list[Neighbour], tokens: int) -> Result:
        """``outcore generate`` in a group with that limit; ``on_text`` is called after each piece of its answer."""
        drop_page_cache(self.files)
        self.log.print(f"{name} under {format_size(limit)}", highlight=False)
        flags = ["--model", str(self.folder), "--prompt", PROMPT, "--max-tokens", str(tokens), "--ignore-chat-template"]
        flags += [x for k, v in self.options.items() for x in ("--" + k.replace("_", "-"), str(v))
                  if k not in ("tokens", "prompt_tokens")]  # fmt: skip
        with Cgroup(f"outcore-pressure-{os.getpid()}", limit) as group, closing_all(others):
            process = subprocess.Popen(
                group.wrap([sys.executable, "-m", "outcore", "generate", *flags]),
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | SAME_OUTCORE,
            )  # fmt: skip
            assert process.stdout is not None and process.stderr is not None
            pieces: list[bytes] = []
            while piece := os.read(process.stdout.fileno(), 1 << 16):
                pieces.append(piece)
                on_text(len(pieces), group)
            errors = process.stderr.read().decode(errors="replace").strip().splitlines()
            status = process.wait()
            return {
                "limit_bytes": limit, "exit": status, "killed": group.kills > 0 or status == -9,
                "text": b"".join(pieces).decode(errors="replace"), "pieces": len(pieces), "stderr": errors,
                "cgroup_peak_bytes": group.peak_bytes,
            }  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """What the scenarios are made of. Bytes, seconds.

    Attributes:
        high, low: the limits A and B.
        step, every_s: how fast the neighbour takes memory.
    """

    tokens: int
    high: int
    low: int
    rounds: int
    step: int
    every_s: float


def lowered(bench: Bench, settings: Settings) -> Result:
    """The limit falls from A to B; beside it, in turn, runs that were planned for B."""
    rounds: list[Result] = []
    for n in range(settings.rounds):
        disk_gbps = [bench.disk_gbps()]
        writers: list[Lowering] = []

        def lower(token: int, group: Cgroup, writers: list[Lowering] = writers) -> None:
            if token == settings.tokens // 2:
                writers.append(Lowering(group, settings.low))
                writers[0].start()

        under = bench.run(f"lowered {n + 1}", settings.high, lower)
        under["lowered"] = writers[0].end() if writers else None
        disk_gbps.append(bench.disk_gbps())
        planned = bench.run(f"planned for B {n + 1}", settings.low)
        disk_gbps.append(bench.disk_gbps())
        rounds.append({"disk_gbps": disk_gbps, "under": under, "planned": planned} | _speeds(under, planned, settings))
    good: list[float] = [r["ratio"] for r in rounds if r["ratio"] is not None]
    return {"rounds": rounds, "ratio": statistics.median(good) if len(good) == len(rounds) else None}


def _speeds(under: Result, planned: Result, settings: Settings) -> Result:
    """Seconds per token of both after shedding; ratio of speeds."""
    if "failed" in under or "failed" in planned:
        return {"ratio": None}
    acts = [d["pass"] for d in under["decisions"] if d["pass"] > settings.tokens // 2]
    if not acts:
        return {"ratio": None}
    # Pass n makes token n; what was decided before it shows in it (shed) or in the one after the next (regrow).
    settled = min(acts[-1] + 2, settings.tokens - SETTLED)
    after = under["seconds"][settled - 2 + 1 :]
    beside = planned["seconds"][1:]
    return {
        "first_act_token": acts[0], "last_act_token": acts[-1], "settled_tokens": len(after),
        "s_per_token": statistics.median(after), "planned_s_per_token": statistics.median(beside),
        "ratio": statistics.median(beside) / statistics.median(after),
        "ratio_of_all_after_first_shed": statistics.mean(beside) / statistics.mean(under["seconds"][acts[0] :]),
        "resident_units": under["resident_units"][-1], "planned_resident_units": planned["resident_units"][-1],
    }  # fmt: skip


def with_neighbour(bench: Bench, settings: Settings) -> Result:
    """Another process takes all but B step by step, holds it for a third of the run, and frees it."""
    others: list[Neighbour] = []

    def meanwhile(token: int, group: Cgroup) -> None:
        if token == settings.tokens // 6:
            others.append(Neighbour(group))
            others[0].grow(settings.high - settings.low, settings.step, settings.every_s)
        elif token == settings.tokens // 2 and others:
            others[0].free()

    result = bench.run("neighbour", settings.high, meanwhile, others)
    return result | {"neighbour_most_bytes": others[0].most if others else 0,
                     "neighbour_bytes_per_s": settings.step / settings.every_s}  # fmt: skip


def cliff(bench: Bench, settings: Settings) -> Result:
    """A budget that leaves next to nothing of the limit."""
    return bench.run("cliff", settings.high, memory=settings.high - CLIFF)


def impossible(bench: Bench, settings: Settings) -> Result:
    """The command, while memory goes below what any plan needs."""
    others: list[Neighbour] = []
    writers: list[Lowering] = []

    def take(piece: int, group: Cgroup) -> None:
        if piece == 4:
            others.append(Neighbour(group))
            others[0].grow(settings.high, settings.step, settings.every_s)

    def lower(piece: int, group: Cgroup) -> None:
        if piece == 4:
            writers.append(Lowering(group, OUTSIDE // 2))
            writers[0].start()

    tokens = 10 * settings.tokens
    taken = bench.command("impossible: neighbour", settings.high, take, others, tokens)
    taken |= {"neighbour_most_bytes": others[0].most if others else 0}
    limit = bench.command("impossible: limit", settings.high, lower, [], tokens)
    limit |= {"lowered": writers[0].end() if writers else None}
    return {"neighbour": taken, "limit": limit}


RUNS: dict[str, Callable[[Bench, Settings], Result]] = {
    "lowered": lowered, "neighbour": with_neighbour, "cliff": cliff, "impossible": impossible,
}  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit status. Takes root."""
    argv = sys.argv[1:] if argv is None else argv
    parser = benchmark.arg_parser("Measure what a run does when memory gets short, as root", tuple(RUNS))
    parser.add_argument("--tokens", type=int, default=80, help="tokens of each run (default: %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=3, help="of each run (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="of the timed pair (default: %(default)s)")
    parser.add_argument("--high", type=float, default=0.75, help="A, of the checkpoint's size (default: %(default)s)")
    parser.add_argument("--low", type=float, default=0.35, help="B, of the checkpoint's size (default: %(default)s)")
    parser.add_argument("--step", type=float, default=25, help="MB a neighbour takes at once (default: %(default)s)")
    parser.add_argument("--every", type=float, default=0.5, help="seconds between two steps (default: %(default)s)")
    parser.add_argument("--dtype", help="to compute in, as in outcore generate")
    args = parser.parse_args(argv)
    only = benchmark.chosen(parser, args, tuple(RUNS))
    if args.tokens < 4 * SETTLED or not 0 < args.low < args.high:
        parser.error(f"at least {4 * SETTLED} tokens, and 0 < --low < --high")
    options = {"tokens": args.tokens, "prompt_tokens": args.prompt_tokens}
    options |= {"dtype": args.dtype} if args.dtype else {}

    def measure(log: Console) -> Result:
        bench = Bench(args.model, options, log)
        settings = Settings(
            tokens=args.tokens,
            high=OUTSIDE + int(args.high * bench.nbytes),
            low=OUTSIDE + int(args.low * bench.nbytes),
            rounds=args.rounds,
            step=int(args.step * 1e6),
            every_s=args.every,
        )
        runs: Result = {"unpressed": bench.run("unpressed", settings.high)}
        if "failed" in runs["unpressed"]:
            raise Failed(f"without pressure: {runs['unpressed']['failed']}")
        for name in only:
            runs[name] = RUNS[name](bench, settings)
        claims = [asdict(claim) for claim in judge(runs)]
        return {"model": bench.record, "settings": asdict(settings), "runs": runs, "claims": claims}

    def table(document: Result, console: Console) -> None:
        console.print(table_of(judge(document["runs"])))

    return benchmark.run("under_pressure", argv, args, measure, table)


if __name__ == "__main__":
    sys.exit(main())
