"""Ends ranks of a run on several machines at random moments, and looks whether all end, in time and with a reason.

    python benchmarks/rank_kills.py 100 --ranks 3 --json benchmarks/results/rank-kills.json
    python benchmarks/rank_kills.py 20 --seed 2 --json benchmarks/results/rank-kills.json    # adds to that
    python benchmarks/rank_kills.py 18 --local -- generate --model ... --memory ... --max-tokens 400 -p "..."

Hosts are network namespaces (``namespaces``). Each trial starts ``outcore launch``, and then one of:

    kill rank, stop rank, cut link    SIGKILL, SIGSTOP, or a cable that is pulled
    kill guard, kill ssh, stop ssh    what stands between the launcher and a rank
    kill launcher                     SIGKILL

It counts from there: seconds until the launcher has ended (not where it was killed itself), its status, which must be
1, whether its words name the rank, and seconds until no process of the run is left, and no socket. A quarter of the
moments lie in the start-up, a quarter while the model is loaded, a quarter in the prompt, and a quarter in the answer,
by how long each took in a run that nothing happened to. With ``--local`` the first host is the launcher's own.

Without a command, ranks run ``tests/support/link_toy.py``; a third of the moments lie in the start-up then.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from namespaces import Namespace, namespaces
from rank_left import MARK, Process, processes, sockets
from rank_moments import GIVE_UP_S, POLL_S, PROGRAM, WAIT_S, Output, Phase, drawn, phases_of_generate, when
from rank_trial import KINDS, ROOT, Trial, tell, write

TOY = ROOT / "tests" / "support" / "link_toy.py"
MOST_S = 10.0


class Trials:
    """Trials on the same hosts.

    Args:
        local: the launcher runs on the first of them.
    """

    def __init__(
        self,
        hosts: list[Namespace],
        folder: Path,
        command: list[str],
        rng: random.Random,
        give_up_s: float,
        local: bool = False,
    ) -> None:
        self.hosts, self.command, self.rng, self.give_up_s, self.local = hosts, command, rng, give_up_s, local
        self.names = [host.name for host in hosts]
        if local:
            self.names[0] = "local"
        self.hostfile = folder / "hosts.json"
        entries = [{"ssh": name, "ips": [host.address]} for name, host in zip(self.names, hosts, strict=True)]
        self.hostfile.write_text(json.dumps(entries))
        self.count = 0
        self.phases: tuple[Phase, ...] = PROGRAM

    def start(self, mark: str) -> Output:
        """The launcher."""
        ssh = f"{sys.executable} {ROOT / 'benchmarks' / 'namespaces.py'}"
        words = ["--hostfile", str(self.hostfile), "--ssh", ssh, *self.command]
        enter = ["nsenter", f"--net=/run/netns/{self.hosts[0].name}"] if self.local else []
        return Output(
            subprocess.Popen(
                [*enter, sys.executable, "-m", "outcore", "launch", *words],
                env={**os.environ, MARK: mark, "PYTHONPATH": str(ROOT / "src")},
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        )

    def rehearse(self) -> None:
        """Learn from one run how long its phases take."""
        mark = self.mark()
        output = self.start(mark)
        try:
            at = {event: when(event, output, lambda: self.there(mark)) for event in ("there", "planned", "text")}
        finally:
            self.clear(mark, output)
        self.phases = phases_of_generate({event: found - output.began for event, found in at.items()})

    def mark(self) -> str:
        """A name for the next run's processes."""
        self.count += 1
        return f"{os.getpid()}-{self.count}"

    def there(self, mark: str) -> bool:
        """Whether all ranks are."""
        ranks = {p.rank for p in processes(mark, self.names) if p.role == "rank"}
        return len(ranks) == len(self.hosts)

    def once(self, kind: str) -> Trial:
        """One trial."""
        mark = self.mark()
        # A rank of the launcher's own host has no ssh.
        rank = self.rng.randrange(int(self.local and kind.endswith("ssh")), len(self.hosts))
        phase, moment = drawn(self.phases, self.rng)
        output = self.start(mark)
        try:
            begun = when(phase.event, output, lambda: self.there(mark))
            time.sleep(max(0.0, begun + moment - time.monotonic()))
            self.strike(kind, rank, output.launcher, mark)
            trial = Trial(kind, rank, moment, None, None, None, [], "", phase=phase.name, ranks=len(self.hosts))
            return self.watch(trial, output, mark)
        finally:
            self.hosts[rank].join()
            self.clear(mark, output)

    def clear(self, mark: str, output: Output) -> None:
        """End whatever is left of a run."""
        for process in processes(mark, self.names):
            # A guard's end is its rank's.
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        output.launcher.wait()

    def strike(self, kind: str, rank: int, launcher: subprocess.Popen[bytes], mark: str) -> None:
        """Do it.

        Raises:
            RuntimeError: the run had ended by itself.
        """
        if launcher.poll() is not None:
            raise RuntimeError(f"ended before its {kind}, status {launcher.returncode}")
        what, _, whom = kind.partition(" ")
        if what == "cut":
            self.hosts[rank].cut()
        elif whom == "launcher":
            launcher.kill()
        else:
            os.kill(self.victim(whom, rank, mark).pid, signal.SIGKILL if what == "kill" else signal.SIGSTOP)

    def victim(self, role: str, rank: int, mark: str) -> Process:
        """The process, as soon as there is one."""
        end = time.monotonic() + WAIT_S
        while time.monotonic() < end:
            for process in processes(mark, self.names):
                if (process.role, process.rank) == (role, rank):
                    return process
            time.sleep(POLL_S)
        raise RuntimeError(f"never a {role} {rank}")

    def watch(self, trial: Trial, output: Output, mark: str) -> Trial:
        """What comes of it."""
        began = time.monotonic()
        while (passed := time.monotonic() - began) < self.give_up_s:
            if trial.ended_s is None and output.launcher.poll() is not None:
                trial.ended_s = passed
            # The one that this trial stopped for the launcher cannot be reached, were it on another host.
            if trial.ended_s is not None and not processes(mark, self.names):
                trial.left_s = passed
                break
            time.sleep(POLL_S)
        trial.status = output.launcher.poll()
        trial.left = [f"{p.role} {p.rank}" for p in processes(mark, self.names)]
        if not trial.left:
            trial.left = [socket for host in self.hosts for socket in sockets(host)]
        if trial.status is not None:
            trial.said = output.end()
        trial.wrong = self.wrong(trial)
        return trial

    def wrong(self, trial: Trial) -> str:
        """What should not be; empty if all is well."""
        if trial.left_s is None or trial.left:
            return f"left: {trial.left}"
        if max(trial.left_s, trial.ended_s or 0.0) > MOST_S:
            return "took too long"
        if trial.kind == "kill launcher":
            return ""
        if trial.status != 1:
            return f"status {trial.status}"
        # Of two that hear nothing of each other, nobody can tell whose cable it was.
        either = trial.kind == "cut link" and len(self.names) == 2
        named = range(2) if either else [trial.rank]
        if not any(f"rank {rank} ({self.names[rank]})" in trial.said for rank in named):
            return "does not name the rank"
        return ""


def parser() -> argparse.ArgumentParser:
    """Flags of its own; what ranks run comes behind ``--``."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("trials", type=int)
    flags.add_argument("--ranks", type=int, default=3)
    flags.add_argument("--local", action="store_true", help="The launcher runs on the first host.")
    flags.add_argument("--kinds", default=",".join(KINDS), help="In turn, or random ones where --random is given.")
    flags.add_argument("--random", action="store_true")
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--json", type=Path, help="Where results go, added to those that are there.")
    flags.add_argument("--give-up", type=float, default=GIVE_UP_S, help="Seconds after which a trial is over.")
    flags.add_argument("--phase", help="The only one in which something happens.")
    flags.add_argument("--seconds", type=float, default=float("inf"), help="Begin no trial after that.")
    return flags


def main() -> int:
    """Run trials; 1 if one went wrong."""
    own, command = sys.argv[1:], ["--", sys.executable, str(TOY), "1000000"]
    if given := "--" in own:
        at = own.index("--")
        own, command = own[:at], own[at:]
    args = parser().parse_args(own)
    kinds, rng, trials = args.kinds.split(","), random.Random(args.seed), []
    end = time.monotonic() + args.seconds
    try:
        with namespaces(args.ranks) as hosts, tempfile.TemporaryDirectory() as folder:
            work = Trials(hosts, Path(folder), command, rng, args.give_up, args.local)
            if given and "/" not in command[1]:
                work.rehearse()
            work.phases = tuple(phase for phase in work.phases if args.phase in (None, phase.name))
            for number in range(args.trials):
                if time.monotonic() > end:
                    break
                trial = work.once(rng.choice(kinds) if args.random else kinds[number % len(kinds)])
                trials.append(trial)
                tell(number + 1, trial)
    finally:
        if trials:
            write(args.json, trials)
    return int(any(trial.wrong for trial in trials))


if __name__ == "__main__":
    sys.exit(main())
