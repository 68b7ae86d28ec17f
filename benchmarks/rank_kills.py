"""Ends ranks of a run on several machines at random moments, and looks whether all end, in time and with a reason.

    python benchmarks/rank_kills.py 100 --ranks 3 --json benchmarks/results/rank-kills.json
    python benchmarks/rank_kills.py 20 --seed 2 --json benchmarks/results/rank-kills.json    # adds to that
    python benchmarks/rank_kills.py 100 -- generate --model ... --memory ...

Hosts are network namespaces (``namespaces``). Each trial starts ``outcore launch``, and then one of:

    kill rank, stop rank, cut link    SIGKILL, SIGSTOP, or a cable that is pulled
    kill guard, kill ssh, stop ssh    what stands between the launcher and a rank
    kill launcher                     SIGKILL

It counts from there: seconds until the launcher has ended (not where it was killed itself), its status, which must be
1, whether its words name the rank, and seconds until no process of the run is left. A third of the moments lie in the
start-up. Without a command, ranks run ``tests/support/link_toy.py``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from namespaces import Namespace, namespaces
from result_file import write_result

ROOT = Path(__file__).resolve().parents[1]
TOY = ROOT / "tests" / "support" / "link_toy.py"
KINDS = ("kill rank", "stop rank", "cut link", "kill guard", "kill ssh", "stop ssh", "kill launcher")
MARK = "OUTCORE_TRIAL"
MOST_S = 10.0
GIVE_UP_S = 30.0


@dataclass
class Trial:
    """What was seen of one.

    Attributes:
        moment: seconds after the rank began at which it happened; the launcher is done when its answer is.
        ended_s: until the launcher had ended. left_s: until nothing was left. None: never.
        left: what was, after ``GIVE_UP_S``.
    """

    kind: str
    rank: int
    moment: float
    status: int | None
    ended_s: float | None
    left_s: float | None
    left: list[str]
    said: str
    wrong: str = ""


@dataclass(frozen=True)
class Process:
    """A process of a trial: what it is, and its rank if it has one."""

    pid: int
    parent: int
    role: str
    rank: int | None


def processes(mark: str, names: Sequence[str]) -> list[Process]:
    """Those of a trial that are left, wherever they hang in the tree.

    Args:
        names: of the hosts, by rank.
    """
    found = list(_marked(mark, names))
    reached = {p.pid: p.rank for p in found if p.role == "ssh"}
    return [replace(p, rank=reached.get(p.parent)) if p.role == "guard" else p for p in found]


def _marked(mark: str, names: Sequence[str]) -> Iterator[Process]:
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            variables = dict(v.partition("=")[::2] for v in (folder / "environ").read_text("latin-1").split("\0"))
            words = (folder / "cmdline").read_text("latin-1").split("\0")[:-1]
            parent = int((folder / "stat").read_text("latin-1").rpartition(")")[2].split()[1])
        except OSError:
            continue
        if variables.get(MARK) != mark or not words:
            continue
        number = int(variables["MLX_RANK"]) if "MLX_RANK" in variables else None
        if number is not None:
            role = "rank"
        elif words[-1] == "outcore.link.guard":
            role = "guard"
        elif len(words) > 1 and words[1].endswith("namespaces.py"):
            role, number = "ssh", names.index(words[-2])
        else:
            role = "launcher" if "launch" in words else "other"
        yield Process(int(folder.name), parent, role, number)


class Trials:
    """Trials on the same hosts."""

    def __init__(
        self, hosts: list[Namespace], folder: Path, command: list[str], rng: random.Random, give_up_s: float
    ) -> None:
        self.hosts, self.command, self.rng, self.give_up_s = hosts, command, rng, give_up_s
        self.hostfile = folder / "hosts.json"
        self.hostfile.write_text(json.dumps([{"ssh": host.name, "ips": [host.address]} for host in hosts]))
        self.names = [host.name for host in hosts]
        self.count = 0

    def start(self, mark: str) -> subprocess.Popen[str]:
        """The launcher."""
        ssh = f"{sys.executable} {ROOT / 'benchmarks' / 'namespaces.py'}"
        words = ["--hostfile", str(self.hostfile), "--ssh", ssh, "--no-check", *self.command]
        return subprocess.Popen(
            [sys.executable, "-m", "outcore", "launch", *words],
            env={**os.environ, MARK: mark, "PYTHONPATH": str(ROOT / "src")},
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def once(self, kind: str) -> Trial:
        """One trial."""
        self.count += 1
        mark = f"{os.getpid()}-{self.count}"
        rank = self.rng.randrange(len(self.hosts))
        moment = self.rng.uniform(0, 0.4) if self.rng.random() < 1 / 3 else self.rng.uniform(0.4, 4.0)
        launcher = self.start(mark)
        try:
            victims = self.await_ranks(mark)
            time.sleep(moment)
            self.strike(kind, rank, launcher, victims)
            return self.watch(Trial(kind, rank, moment, None, None, None, [], ""), launcher, mark)
        finally:
            self.hosts[rank].join()
            for process in processes(mark, self.names):
                os.kill(process.pid, signal.SIGKILL)
            launcher.wait()

    def await_ranks(self, mark: str) -> list[Process]:
        """All processes, once there is a rank on every host."""
        end = time.monotonic() + GIVE_UP_S
        while time.monotonic() < end:
            found = processes(mark, self.names)
            if len({p.rank for p in found if p.role == "rank"}) == len(self.hosts):
                return found
            time.sleep(0.01)
        raise RuntimeError(f"ranks did not start: {found}")

    def strike(self, kind: str, rank: int, launcher: subprocess.Popen[str], found: list[Process]) -> None:
        """Do it."""
        what, _, whom = kind.partition(" ")
        if what == "cut":
            self.hosts[rank].cut()
            return
        if whom == "launcher":
            launcher.kill()
            return
        pid = next(p.pid for p in found if (p.role, p.rank) == (whom, rank))
        os.kill(pid, signal.SIGKILL if what == "kill" else signal.SIGSTOP)

    def watch(self, trial: Trial, launcher: subprocess.Popen[str], mark: str) -> Trial:
        """What comes of it."""
        began = time.monotonic()
        while (passed := time.monotonic() - began) < self.give_up_s:
            if trial.ended_s is None and launcher.poll() is not None:
                trial.ended_s = passed
            # The one that this trial stopped for the launcher cannot be reached, were it on another host.
            if trial.ended_s is not None and not processes(mark, self.names):
                trial.left_s = passed
                break
            time.sleep(0.02)
        trial.status = launcher.poll()
        trial.left = [f"{p.role} {p.rank}" for p in processes(mark, self.names)]
        if trial.status is not None:
            assert launcher.stderr is not None
            trial.said = launcher.stderr.read()[-1000:]
        trial.wrong = self.wrong(trial)
        return trial

    def wrong(self, trial: Trial) -> str:
        """What should not be; empty if all is well."""
        if trial.left_s is None:
            return f"left: {trial.left}"
        if max(trial.left_s, trial.ended_s or 0.0) > MOST_S:
            return "took too long"
        if trial.kind == "kill launcher":
            return ""
        if trial.status != 1:
            return f"status {trial.status}"
        if f"rank {trial.rank} ({self.hosts[trial.rank].name})" not in trial.said:
            return "does not name the rank"
        return ""


def summary(trials: list[Trial]) -> list[dict[str, object]]:
    """By kind."""
    rows: list[dict[str, object]] = []
    for kind in KINDS:
        of_kind = [t for t in trials if t.kind == kind]
        seconds = [t.left_s for t in of_kind if t.left_s is not None]
        if of_kind:
            rows.append(
                {
                    "kind": kind,
                    "trials": len(of_kind),
                    "failures": sum(bool(t.wrong) for t in of_kind),
                    "median_s": statistics.median(seconds) if seconds else None,
                    "longest_s": max(seconds, default=None),
                }
            )
    return rows


def main() -> int:
    """Run trials; 1 if one went wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trials", type=int)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="Where results go, added to those that are there.")
    parser.add_argument("--give-up", type=float, default=GIVE_UP_S, help="Seconds after which a trial is over.")
    parser.add_argument("--program", action="store_true", help="The command is a program of its own.")
    own, command = sys.argv[1:], ["--program", "--", sys.executable, str(TOY), "1000000"]
    if "--" in own:
        at = own.index("--")
        own, command = own[:at], own[at:]
    args = parser.parse_args(own)
    command = [*["--program"] * args.program, *command]
    kinds = args.kinds.split(",")
    trials = []
    with namespaces(args.ranks) as hosts, tempfile.TemporaryDirectory() as folder:
        work = Trials(hosts, Path(folder), command, random.Random(args.seed), args.give_up)
        for number in range(args.trials):
            trial = work.once(kinds[number % len(kinds)])
            trials.append(trial)
            ended = "-" if trial.ended_s is None else f"{trial.ended_s:.1f}"
            left = "-" if trial.left_s is None else f"{trial.left_s:.1f}"
            print(f"{number + 1:4} {trial.kind:13} rank {trial.rank} at {trial.moment:.2f} s: launcher {ended} s, "
                  f"nothing left {left} s, status {trial.status} {trial.wrong}", flush=True)  # fmt: skip
            if trial.wrong:
                print(trial.said, flush=True)
    bad = any(trial.wrong for trial in trials)
    if args.json is not None and args.json.exists():
        before = json.loads(args.json.read_text())
        trials = [*(Trial(**trial) for trial in before["trials"]), *trials]
    rows = summary(trials)
    for row in rows:
        print(row)
    failures = sum(bool(t.wrong) for t in trials)
    found = {"ranks": args.ranks, "count": len(trials), "failures": failures, "results": rows}
    write_result(args.json, "rank_kills", ROOT, **found, trials=[asdict(t) for t in trials])
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
