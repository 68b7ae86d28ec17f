"""Measures what a run does when memory gets short under it: same tokens, no kill, and speed after shedding.

    python bench/under_pressure.py models/llama-4gb --json under-pressure.json

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

import argparse
import itertools
import json
import os
import shlex
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from rich.console import Console
from rich.table import Table

import outcore
from outcore.bench.cgroup import Cgroup
from outcore.bench.disk import disk_rate
from outcore.bench.fingerprint import machine
from outcore.bench.measure import prompt_ids
from outcore.bench.page_cache import drop_page_cache
from outcore.checkpoint import open_checkpoint
from outcore.errors import OutcoreError
from outcore.loader import prepare
from outcore.memory import peak_rss, process_memory_limit
from outcore.sizes import format_size

Result = dict[str, Any]
SCENARIOS = ("lowered", "neighbour", "cliff", "impossible")
OUTSIDE = 200_000_000
SAME_OUTCORE = {"PYTHONPATH": str(Path(outcore.__file__).parents[1]), "PYTHONUNBUFFERED": "1"}
DISK_BYTES = 1_000_000_000
RETRY_S = 0.25
"""Seconds between two tries to lower a limit."""
CLIFF = 8192
"""Bytes between a limit and a budget that was made without regard to it: a larger budget than the limit is refused."""
SETTLED = 5
"""Tokens at least that a speed after shedding is the median of."""
RATIO = 0.9
PROMPT = "Once upon a time"
WIDTH = 140

# ---- what runs in a process of its own ---------------------------------------------------------------------------


def generate(folder: str, tokens: int, prompt_tokens: int, **options: Any) -> Result:
    """Outcore's own loop, a line of standard output for each token; ``options`` go to ``outcore.load``."""
    options |= {"context": prompt_tokens + tokens, "prompt": prompt_tokens}
    wanted = prepare(folder, **options).plan
    began = time.perf_counter()
    model, tokenizer = outcore.load(folder, **options)
    session = model.outcore
    tokenizer.eos_token_ids = set()  # random weights may end a text anywhere
    planned = session.plan
    stamps, ids, resident, free = [time.perf_counter()], [], [], []
    for r in outcore.stream_generate(model, tokenizer, prompt_ids(prompt_tokens), max_tokens=tokens):
        stamps.append(time.perf_counter())
        ids.append(r.token)
        resident.append(len(session.plan.resident))
        free.append(process_memory_limit().available)
        print(json.dumps({"token": len(ids), "resident": resident[-1], "free": free[-1]}))
    watch = session.watch
    decisions = watch.decisions if watch is not None else []
    session.close()
    return {
        "tokens": ids,
        "load_s": stamps[0] - began,
        "ttft_s": stamps[1] - stamps[0],
        "seconds": [b - a for a, b in itertools.pairwise(stamps[1:])],
        "resident_units": resident,
        "free_bytes": free,
        "budget_bytes": planned.budget_bytes,
        "planned_peak_bytes": planned.peak_bytes,
        "planned_resident_units": len(wanted.resident),
        "loaded_resident_units": len(planned.resident),
        "layers": len(planned.resident) + len(planned.streamed),
        "slots": planned.slots,
        "io": session.io,
        "peak_memory_bytes": mx.get_peak_memory(),
        "peak_rss_bytes": peak_rss(),
        "misses": session.metrics.misses,
        "decisions": [{"pass": at} | asdict(d) for at, d in decisions],
    }


def neighbour() -> Result:
    """Takes and frees memory as the lines of standard input say: bytes in all that it shall hold."""
    held: list[bytearray] = []
    for line in sys.stdin:
        wanted = int(line)
        while sum(map(len, held)) > wanted:
            held.pop()
        if (more := wanted - sum(map(len, held))) > 0:
            block = bytearray(more)
            block[::4096] = b"\1" * len(range(0, more, 4096))
            held.append(block)
        print(sum(map(len, held)))
    return {}


def disk(folder: str) -> Result:
    """GB/s that a reader gets of the weight files which does nothing else."""
    return asdict(disk_rate(open_checkpoint(Path(folder)).files, threads=(4,), most=DISK_BYTES))


CHILDREN: dict[str, Callable[..., Result]] = {"generate": generate, "neighbour": neighbour, "disk": disk}


def child(kind: str, options: Result) -> int:
    """Take one measurement in this process and print it."""
    try:
        print(json.dumps(CHILDREN[kind](**options)))
    except OutcoreError as e:
        print(f"{type(e).__name__}: {e}", file=sys.stderr)
        return 1
    return 0


# ---- running them -----------------------------------------------------------------------------------------------


class Failed(Exception):
    """A run gave no result: it was killed, or ended with an error."""


class Lowering(threading.Thread):
    """Writes a limit until the kernel takes it, or ``stop`` is called."""

    def __init__(self, group: Cgroup, limit: int) -> None:
        super().__init__(daemon=True)
        self.group, self.limit = group, limit
        self.tries = 0
        self.seconds: float | None = None  # until it was taken
        self._done = threading.Event()

    def run(self) -> None:
        began = time.perf_counter()
        while not self._done.is_set():
            self.tries += 1
            if self.group.set_limit(self.limit):
                self.seconds = time.perf_counter() - began
                return
            self._done.wait(RETRY_S)

    def end(self) -> Result:
        """Try no more; what came of it."""
        self._done.set()
        self.join()
        return {"limit_bytes": self.limit, "tries": self.tries, "seconds": self.seconds}


class Neighbour:
    """A second process in the group, that holds as much memory as it is told to."""

    def __init__(self, group: Cgroup) -> None:
        self.process = subprocess.Popen(
            group.wrap(_command("neighbour", {})),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | SAME_OUTCORE,
        )  # fmt: skip
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        self.most = 0
        self.hold(0)

    def hold(self, nbytes: int) -> None:
        """Hold so many bytes in all from now on."""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(f"{nbytes}\n")
            self.process.stdin.flush()
            self.most = max(self.most, int(self.process.stdout.readline() or 0))
        except (OSError, ValueError):
            self._done.set()  # it was killed

    def grow(self, to: int, step: int, every_s: float) -> None:
        """Take ``step`` more each ``every_s`` seconds, in a thread of its own."""

        def steps() -> None:
            for held in range(step, to + step, step):
                if self._done.wait(every_s):
                    return
                self.hold(min(held, to))

        self._thread = threading.Thread(target=steps, daemon=True)
        self._thread.start()

    def free(self) -> None:
        """Grow no more, and give all back."""
        self._done.set()
        if self._thread is not None:
            self._thread.join()
        self.hold(0)

    def close(self) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join()
        self.process.kill()
        self.process.wait()


@contextmanager
def closing_all(others: list[Neighbour]) -> Iterator[None]:
    """Ends neighbours that came meanwhile: a group with processes in it cannot be removed."""
    try:
        yield
    finally:
        for other in others:
            other.close()


def _command(kind: str, options: Result) -> list[str]:
    return [sys.executable, str(Path(__file__).resolve()), "--child", kind, json.dumps(options)]


OnToken = Callable[[int, Cgroup], None]
NOTHING: list[Neighbour] = []


class Bench:
    """Runs a model in control groups, each run in a fresh process."""

    def __init__(self, folder: Path, options: Result, log: Console) -> None:
        checkpoint = open_checkpoint(folder)
        self.folder = folder
        self.files = checkpoint.files
        self.nbytes = sum(file.stat().st_size for file in checkpoint.files)
        self.options = options
        self.log = log

    def disk_gbps(self) -> float:
        """GB/s that the disk gives now."""
        done = subprocess.run(
            _command("disk", {"folder": str(self.folder)}),
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
                group.wrap(_command("generate", options)),
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

# ---- what of it is promised -------------------------------------------------------------------------------------


def judge(results: Result) -> list[tuple[str, str, str, bool]]:
    """Claim, what was measured, the bound, and whether it holds."""
    claims = []
    expected = results["unpressed"]["tokens"]

    def survived(what: str, run: Result) -> None:
        if "failed" in run:
            claims.append((f"{what}: survives", str(run["failed"]), "not killed, no error", False))
            return
        peak = f"{format_size(run['cgroup_peak_bytes'])} at most of {format_size(run['limit_bytes'])}"
        claims.append((f"{what}: survives", peak, "not killed, no error", not run["killed"]))
        same = run["tokens"] == expected[: len(run["tokens"])]
        claims.append((f"{what}: tokens", f"{len(run['tokens'])} " + ("equal" if same else "differ"), "equal", same))

    for n, r in enumerate(results.get("lowered", {}).get("rounds", []), 1):
        survived(f"lowered {n}", r["under"])
        took = (r["under"].get("lowered") or {}).get("seconds")
        shown = f"after {took:.1f} s" if took is not None else "never"
        claims.append((f"lowered {n}: the kernel takes the limit", shown, "taken", took is not None))
        if r["ratio"] is not None:
            measured = (f"{r['ratio']:.3f} ({r['s_per_token']:.3f} s a token with {r['resident_units']} resident, "
                        f"planned {r['planned_s_per_token']:.3f} s with {r['planned_resident_units']})")  # fmt: skip
            claims.append((f"lowered {n}: speed over that of a run planned for B", measured, "", True))
    if "lowered" in results:
        ratio = results["lowered"]["ratio"]
        shown = f"{ratio:.3f}" if ratio is not None else "none"
        claims.append(("lowered: median of these", shown, f"≥ {RATIO}", ratio is not None and ratio >= RATIO))
    for name in ("neighbour", "cliff"):
        if name in results:
            survived(name, results[name])
            acts = [f"{d['pass']}: " + (f"-{d['shed']}" if d["shed"] else f"+{d['regrow']}")
                    for d in results[name].get("decisions", [])]  # fmt: skip
            if "failed" not in results[name]:
                planned, loaded = (results[name][f"{when}_resident_units"] for when in ("planned", "loaded"))
                least = min(results[name]["resident_units"])
                measured = f"{planned} planned, {loaded} loaded, {least} at least; " + ", ".join(acts)
                claims.append((f"{name}: comes down", measured, "by itself", least < planned))
    if "neighbour" in results:
        grown = [d["regrow"] for d in results["neighbour"].get("decisions", []) if d["regrow"]]
        claims.append(("neighbour: regrows", f"{sum(grown)} layers", "some", bool(grown)))
    for name, run in results.get("impossible", {}).items():
        line = run["stderr"][-1] if run["stderr"] else ""
        claims.append((f"impossible, {name}: not killed", f"exit status {run['exit']}", "1", run["exit"] == 1))
        claims.append((f"impossible, {name}: answer so far", f"{run['pieces']} pieces", "printed", run["pieces"] > 3))
        one = len(run["stderr"]) == 1 and "memory ran out" in line
        claims.append((f"impossible, {name}: one clear line", line, "what, how much, where", one))
    return claims


def show(claims: list[tuple[str, str, str, bool]], console: Console) -> None:
    """The table that the run ends with."""
    table = Table("claim", "measured", "bound", "holds", show_lines=True)
    for claim, measured, bound, holds in claims:
        table.add_row(claim, measured, bound, "[green]yes" if holds else "[bold red]no")
    console.print(table)


# ---- command ----------------------------------------------------------------------------------------------------


def setup_arg_parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    parser = argparse.ArgumentParser(
        description="Measure what a run does when memory gets short; the last line is one JSON document. Takes root."
    )
    parser.add_argument("model", type=Path, help="local model folder")
    parser.add_argument("--tokens", type=int, default=80, help="tokens of each run (default: %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=3, help="of each run (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="of the timed pair (default: %(default)s)")
    parser.add_argument("--high", type=float, default=0.75, help="A, of the checkpoint's size (default: %(default)s)")
    parser.add_argument("--low", type=float, default=0.35, help="B, of the checkpoint's size (default: %(default)s)")
    parser.add_argument("--step", type=float, default=25, help="MB a neighbour takes at once (default: %(default)s)")
    parser.add_argument("--every", type=float, default=0.5, help="seconds between two steps (default: %(default)s)")
    parser.add_argument("--dtype", help="to compute in, as in outcore generate")
    parser.add_argument("--only", default=",".join(SCENARIOS), help="some of these, with commas (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the JSON document there too")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["--child"]:
        return child(argv[1], json.loads(argv[2]))
    parser = setup_arg_parser()
    args = parser.parse_args(argv)
    only = args.only.split(",")
    if unknown := set(only) - set(SCENARIOS):
        parser.error(f"--only {','.join(sorted(unknown))}: choose from {','.join(SCENARIOS)}")
    if args.tokens < 4 * SETTLED or not 0 < args.low < args.high:
        parser.error(f"at least {4 * SETTLED} tokens, and 0 < --low < --high")
    # Names only: results are shared, and where things lie on one machine is nobody's business.
    shown = shlex.join(Path(a).name if os.sep in a else a for a in argv)
    options = {"tokens": args.tokens, "prompt_tokens": args.prompt_tokens}
    options |= {"dtype": args.dtype} if args.dtype else {}
    document: Result = {"command": f"python bench/under_pressure.py {shown}", "machine": asdict(machine(args.model))}
    try:
        bench = Bench(args.model, options, Console(stderr=True))
        settings = Settings(
            tokens=args.tokens,
            high=OUTSIDE + int(args.high * bench.nbytes),
            low=OUTSIDE + int(args.low * bench.nbytes),
            rounds=args.rounds,
            step=int(args.step * 1e6),
            every_s=args.every,
        )
        began = time.perf_counter()
        results: Result = {"unpressed": bench.run("unpressed", settings.high)}
        if "failed" in results["unpressed"]:
            raise Failed(f"without pressure: {results['unpressed']['failed']}")
        for name in only:
            results[name] = RUNS[name](bench, settings)
    except (OutcoreError, Failed) as e:
        print(f"under_pressure: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    claims = judge(results)
    document |= {
        "model": {"folder": args.model.resolve().name, "nbytes": bench.nbytes},
        "settings": asdict(settings),
        "wall_s": time.perf_counter() - began,
        "runs": results,
        "claims": [dict(zip(("claim", "measured", "bound", "holds"), c, strict=True)) for c in claims],
    }
    show(claims, Console(width=None if sys.stdout.isatty() else WIDTH))
    print(json.dumps(document))
    if args.json:
        args.json.write_text(json.dumps(document, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
