"""What was seen of one kill of a run on several machines, and of many."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from result_file import write_result

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("kill rank", "stop rank", "cut link", "kill guard", "kill ssh", "stop ssh", "kill launcher")


@dataclass
class Trial:
    """What was seen of one.

    Attributes:
        moment: seconds after the phase's event at which it happened. ranks: how many there were.
        ended_s: until the launcher had ended. left_s: until nothing was left. None: never.
        left: what was, after ``GIVE_UP_S``, and sockets that were when no process was.
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
    phase: str = ""
    ranks: int = 0


def summary(trials: Sequence[Trial], by: str, names: Sequence[str]) -> list[dict[str, object]]:
    """By kind, or by phase."""
    rows: list[dict[str, object]] = []
    for name in names:
        of_kind = [t for t in trials if getattr(t, by) == name]
        seconds = [t.left_s for t in of_kind if t.left_s is not None]
        if of_kind:
            rows.append(
                {
                    by: name,
                    "trials": len(of_kind),
                    "failures": sum(bool(t.wrong) for t in of_kind),
                    "median_s": statistics.median(seconds) if seconds else None,
                    "longest_s": max(seconds, default=None),
                }
            )
    return rows


def tell(number: int, trial: Trial) -> None:
    """A line for a trial, and what was said where something was wrong."""
    ended, left = ("-" if s is None else f"{s:.1f}" for s in (trial.ended_s, trial.left_s))
    print(
        f"{number:4} {trial.kind:13} rank {trial.rank}, {trial.phase} + {trial.moment:.2f} s: launcher {ended} s, "
        f"nothing left {left} s, status {trial.status} {trial.wrong}",
        flush=True,
    )
    if trial.wrong:
        print(trial.said, flush=True)


def write(file: Path | None, trials: list[Trial]) -> None:
    """All results, and those that are in the file."""
    if file is not None and file.exists():
        before = json.loads(file.read_text())
        trials = [*(Trial(**trial) for trial in before["trials"]), *trials]
    rows = summary(trials, "kind", KINDS)
    phases = summary(trials, "phase", list(dict.fromkeys(trial.phase for trial in trials)))
    for row in [*rows, *phases]:
        print(row)
    found = {
        "ranks": sorted({trial.ranks for trial in trials}),
        "count": len(trials),
        "failures": sum(bool(t.wrong) for t in trials),
        "results": rows,
        "phases": phases,
    }
    write_result(file, "rank_kills", ROOT, **found, trials=[asdict(t) for t in trials])
