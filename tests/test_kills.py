"""A few of the kills of ``benchmarks/kills.py``, and that it would notice if the next run were the worse for one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import kills
from quick_transformers import python_path

BENCH = Path(kills.__file__).parent


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": python_path(BENCH, BENCH.parent / "src")}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=300)


def test_whatever_is_killed_the_next_run_is_as_if_nothing_had_been(tmp_path: Path) -> None:
    """What drafts is written behind what a model's code makes of its weights (``overlay``)."""
    done = run(str(BENCH / "kills.py"), "3", "--kinds", "pack,draft,batch", "--json", str(tmp_path / "r.json"))
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["kills"] >= 3 and found["failures"] == 0
    assert [kind["kind"] for kind in found["results"]] == ["pack", "draft", "batch"]
    assert sum(kind["kills"][kills.EVENTS] for kind in found["results"]) > 0


CARELESS = """
import random, sys, tempfile
from pathlib import Path
import kills
from kills_work import Kind

def careless(models, room):
    cache = room / "cache"
    cache.mkdir(exist_ok=True)
    kept = cache / "copy.bin"
    if WHAT == "half" and not kept.exists():
        kept.write_bytes(bytes(100))
        with kept.open("ab", buffering=0) as file:
            kills.os.write(file.fileno(), bytes(100))
    if WHAT == "left":
        temporary = cache / f"{random.random()}.tmp"
        temporary.write_bytes(bytes(100))
        temporary.rename(kept)
    if WHAT == "blocked":
        (cache / "lock").touch(exist_ok=False)
        kept.write_bytes(bytes(200))
        (cache / "lock").unlink()
    if WHAT == "model":
        scratch = models / f"scratch-{random.random()}"
        scratch.touch()
        scratch.unlink()
    print("done")

for WHAT in ("half", "left", "blocked", "model", "nothing"):
    with tempfile.TemporaryDirectory() as folder:
        world = Path(folder)
        for name in ("models", "tmp"):
            (world / name).mkdir()
        trials = kills.Trials(Kind("careless", 1, careless, lambda said, room: said), world, random.Random(0))
        for _ in range(25):
            trials.once()
        print(WHAT, bool(trials.counts.failures))
"""


def test_work_that_a_kill_spoils_is_found_out() -> None:
    done = run("-c", CARELESS)
    assert done.returncode == 0, done.stderr
    assert dict(line.split() for line in done.stdout.splitlines()) == {
        "half": "True", "left": "True", "blocked": "True", "model": "True", "nothing": "False",
    }  # fmt: skip
