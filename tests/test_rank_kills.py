"""A few of the trials of ``benchmarks/rank_kills.py``, and that it would notice a run that goes on."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import rank_kills
from quick_transformers import python_path

BENCH = Path(rank_kills.__file__).parent
has_namespaces = (
    sys.platform == "linux"
    and os.geteuid() == 0
    and shutil.which("ip") is not None
    and subprocess.run(["ip", "netns", "list"], capture_output=True).returncode == 0
)
pytestmark = pytest.mark.skipif(not has_namespaces, reason="network namespaces need Linux and root")


def run(*words: str) -> tuple[int, list[dict[str, object]]]:
    file = Path(words[words.index("--json") + 1])
    environment = {**os.environ, "PYTHONPATH": python_path(BENCH, BENCH.parent / "src")}
    command = [sys.executable, str(BENCH / "rank_kills.py"), *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert file.exists(), done.stderr
    return done.returncode, json.loads(file.read_text())["trials"]


def test_a_cut_link_ends_all_ranks_on_hosts_of_their_own(tmp_path: Path) -> None:
    """A kill looks there as it does on one host: test_serve_ranks.py and test_link_processes.py."""
    status, trials = run("1", "--ranks", "2", "--kinds", "cut link", "--json", str(tmp_path / "r.json"))
    assert status == 0, trials
    assert [(trial["status"], trial["wrong"]) for trial in trials] == [(1, "")]


def test_a_run_that_no_process_ends_is_found(tmp_path: Path) -> None:
    # Ranks that have no link: what happens to the cable is nothing to them.
    sleep = [sys.executable, "-c", "import time; time.sleep(100)"]
    words = ["1", "--ranks", "2", "--kinds", "cut link", "--give-up", "4", "--json", str(tmp_path / "r.json")]
    status, (trial,) = run(*words, "--", *sleep)
    assert status == 1
    assert str(trial["wrong"]).startswith("left: ")
