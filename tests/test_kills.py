"""A few of the kills of ``benchmarks/kills.py``, and that it would notice if the next run were the worse for one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kills
from quick_transformers import python_path

BENCH = Path(kills.__file__).parent


WORK = """
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

status = kills.main()
print("status", status)
for WHAT in ("half", "left", "blocked", "model", "nothing"):
    with tempfile.TemporaryDirectory() as folder:
        world = Path(folder)
        for name in ("models", "tmp"):
            (world / name).mkdir()
        trials = kills.Trials(Kind("careless", 1, careless, lambda said, room: said), world, random.Random(0))
        for _ in range(6):
            trials.once()
        print(WHAT, bool(trials.counts.failures))
"""
"""Whatever ``kills.py`` is asked for, and then work that a kill spoils: in one process, as importing takes longer."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("kills") / "r.json"
    own = {
        "OUTCORE_MONITOR": "off",
        "OUTCORE_CONFIG": os.devnull,
        "PYTHONPATH": python_path(BENCH, BENCH.parent / "src"),
    }
    command = [sys.executable, "-c", WORK, "1", "--kinds", "draft", "--seed", "1", "--json", str(file)]
    done = subprocess.run(command, env=os.environ | own, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    said = (line.split() for line in done.stdout.splitlines())
    return json.loads(file.read_text()) | {words[0]: words[1] for words in said if len(words) == 2}


def test_whatever_is_killed_the_next_run_is_as_if_nothing_had_been(found: dict[str, Any]) -> None:
    """What drafts is written behind what a model's code makes of its weights (``overlay``); ``test_pack_begun.py`` has
    packing, ``test_batch_command.py`` a batch."""
    assert found["status"] == "0" and found["failures"] == 0
    (kind,) = found["results"]
    assert kind["kind"] == "draft" and kind["kills"][kills.EVENTS] == found["kills"] == 1


def test_work_that_a_kill_spoils_is_found_out(found: dict[str, Any]) -> None:
    wanted = {"half": "True", "left": "True", "blocked": "True", "model": "True", "nothing": "False"}
    assert {name: found[name] for name in wanted} == wanted
