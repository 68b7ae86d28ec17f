"""Kills ``outcore draft train`` at random moments, resumes it each time, and compares the drafter's held-out figure
with that of a run that was never killed.

    python benchmarks/train_kills.py MODEL TEXT... --kills 20 --json benchmarks/results/train-kills-cpu.json

The command runs as a process of its own, which is ended by SIGKILL in one of four phases: collecting states, training,
judging and saving. A pipe tells in which phase it is; the phase, which of its turns and the moment within it are drawn.
``--minutes`` count over all runs. ``--clock looks``: each look at the clock takes ``LOOK`` seconds, so that both
drafters learn for equally many steps on a machine that does other work, too; ``processor``: the processor's time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from result_file import write_result

COLLECTING, TRAINING, JUDGING, SAVING = "collecting", "training", "judging", "saving"

# Of 20 kills; states are collected first, and texts that are there are not collected again.
SHARES = {COLLECTING: 4, TRAINING: 6, JUDGING: 5, SAVING: 5}

# How often the kill is in the phase's second turn.
SECOND = 0.2

# The variables with the number of the pipe's writing end, and with the clock.
PIPE, CLOCK = "TRAIN_KILLS_PIPE", "TRAIN_KILLS_CLOCK"

LOOK = 0.4


def child() -> None:
    """The command in this process. It tells the parent its phases, and its clock is ``CLOCK``."""
    pipe, inside = int(os.environ[PIPE]), list[str]()

    def told(owner: Any, name: str, phase: str) -> None:
        own: Callable[..., Any] = getattr(owner, name)

        def call(*args: Any, **named: Any) -> Any:
            inside.append(phase)
            os.write(pipe, f"{phase}\n".encode())
            try:
                return own(*args, **named)
            finally:
                inside.pop()
                os.write(pipe, f"{inside[-1] if inside else ''}\n".encode())

        setattr(owner, name, call)

    import mlx.core as mx

    from outcore.cli.main import main as command_line
    from outcore_drafters import command
    from outcore_drafters.train import collect, training

    class Clock:
        looks = itertools.count()
        monotonic = staticmethod(
            time.process_time if os.environ[CLOCK] == "processor" else lambda: next(Clock.looks) * LOOK
        )

    command.time = training.time = Clock  # type: ignore[attr-defined, assignment]
    told(collect, "continue_texts", COLLECTING)
    told(training.Trainer, "run", TRAINING)
    told(training.Trainer, "_judge", JUDGING)
    told(mx, "save_safetensors", SAVING)
    sys.exit(command_line())


class Run:
    """One run of the command.

    Args:
        kill: phase, which of its turns, and seconds after that began; None: it runs to its end.
    """

    def __init__(self, words: list[str], clock: str, kill: tuple[str, int, float] | None = None) -> None:
        self._kill = kill
        self.turns: Counter[str] = Counter()
        self.took: defaultdict[str, list[float]] = defaultdict(list)  # seconds of each phase's turns
        reads, writes = os.pipe()
        began = time.perf_counter()
        environment = {**os.environ, PIPE: str(writes), CLOCK: clock, "OPENBLAS_NUM_THREADS": "1"}
        with tempfile.TemporaryFile() as said:
            self._process = subprocess.Popen(
                [sys.executable, __file__, "--child", *words], pass_fds=[writes], env=environment, stdout=said,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            os.close(writes)
            self.phase = self._followed(reads)
            self.status, self.seconds = self._process.wait(), time.perf_counter() - began
            said.seek(0)
            self.said = said.read().decode(errors="replace")
        if self.status not in (0, -signal.SIGKILL):
            raise RuntimeError(self.said[-3000:])

    def _followed(self, reads: int) -> str:
        """Returns the phase in which the process was when it ended."""
        now, since = "", time.perf_counter()
        with os.fdopen(reads) as lines:
            for line in lines:
                told, at = line.strip(), time.perf_counter()
                if now:
                    self.took[now].append(at - since)
                now, since = told, at
                self.turns[told] += bool(told)
                if self._kill and (told, self.turns[told]) == self._kill[:2]:
                    threading.Timer(self._kill[2], self._process.kill).start()
                    self._kill = None
        return now


def trained(run: Run, out: Path) -> dict[str, Any]:
    """What a finished training said of its drafter."""
    left = sorted(p.name for p in out.iterdir())
    if run.status or left != ["README.md", "config.json", "model.safetensors"]:
        raise RuntimeError(f"left behind: {left}")
    figure = json.loads((out / "config.json").read_text())["outcore_training"]["tokens_a_pass"]
    record = json.loads(run.said[run.said.index("{") :])  # empty: the last kill came when the drafter was there
    return {"tokens_a_pass": figure} | {key: record[key] for key in ("texts", "steps", "history") if key in record}


def main() -> int:
    parser = argparse.ArgumentParser(description="Kills a training, and compares what it comes to.")
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path, nargs="+")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--clock", default="looks", choices=["looks", "processor"])
    parser.add_argument("--disk", default="100MB")
    parser.add_argument("--memory", default="900MB")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    rng, found = random.Random(args.seed), dict[str, Any]()
    phases = [p for p, share in SHARES.items() for _ in range(round(args.kills * share / 20))]
    first = phases.count(COLLECTING)
    rest = phases[first:]
    rng.shuffle(rest)
    with tempfile.TemporaryDirectory(prefix="outcore-train-kills-") as room:

        def words(out: Path) -> list[str]:
            options = {"minutes": args.minutes, "disk": args.disk, "memory": args.memory,
                       "max-tokens": args.max_tokens, "seed": args.seed, "output": out}  # fmt: skip
            named = [w for key, value in options.items() for w in (f"--{key}", str(value))]
            return ["draft", "train", "--model", str(args.model), "--input", *map(str, args.text), *named, "--json"]

        whole = Run(words(Path(room, "whole")), args.clock)
        found["undisturbed"] = trained(whole, Path(room, "whole")) | {"seconds": round(whole.seconds, 1)}
        usual = {phase: sum(took) / len(took) for phase, took in whole.took.items()}
        print(found, {p: round(s, 2) for p, s in usual.items()}, dict(whole.turns), flush=True)

        out, kills, seconds, run = Path(room, "killed"), Counter[str](), 0.0, whole
        for phase in [*phases[:first], *rest]:
            kill = phase, 1 + (rng.random() < SECOND), rng.uniform(0, usual[phase])
            run = Run(words(out), args.clock, kill)
            seconds += run.seconds
            if run.status == 0:
                break
            kills[run.phase or "between"] += 1
            print(*kill, "killed in", run.phase or "between", f"{run.seconds:.1f} s", flush=True)
        if run.status:
            run = Run(words(out), args.clock)
            seconds += run.seconds
        found["killed"] = trained(run, out) | {"seconds": round(seconds, 1), "kills": dict(kills)}
    share = found["killed"]["tokens_a_pass"] / found["undisturbed"]["tokens_a_pass"]
    print(found, f"{share:.4f} of the undisturbed")
    write_result(args.json, "train_kills", args.model, **found, share=round(share, 4))
    return int(sum(kills.values()) < args.kills or abs(share - 1) > 0.02)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        del sys.argv[1]
        child()
    sys.exit(main())
