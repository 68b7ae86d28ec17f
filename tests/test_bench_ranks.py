"""``outcore bench`` on several machines: each row is a run of processes beside the run that asks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import zoo
from link_ranks import in_threads, linked
from outcore.checkpoint.pack import pack_model
from outcore.cli.main import main
from outcore_bench.jobs import BenchSettings, RunSettings, make_jobs
from outcore_bench.measure import measure
from outcore_bench.processes import KILLED
from outcore_bench.ranked_runner import _first
from outcore_cluster.link import environment as names
from outcore_cluster.link.beside import run_beside
from outcore_cluster.link.environment import from_environment


def bench(folder: Path, *words: str) -> dict[str, Any]:
    given = [
        "bench",
        str(folder),
        "--tokens",
        "4",
        "--repeats",
        "1",
        "--warmup",
        "0",
        "--prompt-tokens",
        "20",
        "--json",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "outcore", "launch", "--hosts", "local,localhost", "--", *given, *words],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=150,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_rows_are_measured_by_all_machines(tmp_path: Path) -> None:
    """And those that cannot be are told with whose fault that is."""
    folder = zoo.save_checkpoint("llama", tmp_path / "model")
    output = tmp_path / "out.json"
    asked = BenchSettings(("outcore",), (), ("0",), run=RunSettings(tokens=4, prompt_tokens=20, repeats=1, warmup=0))
    vocabulary = int(zoo.CONFIGS["llama"]["vocab_size"])
    alone = measure(make_jobs(asked, str(folder), 4, fits=False, vocabulary=vocabulary)[0])
    found = bench(folder, "--resident", "0,100%", "--memory", "1MB", "--output", str(output))
    assert json.loads(output.read_text())["rows"] == found["rows"]
    assert found["settings"]["hosts"] == ["local", "localhost"] and found["model"]["layers"] == 4
    whole, refused, streamed = found["rows"]
    assert found["command"].startswith("outcore launch --hosts local,localhost -- bench model --tokens 4")
    assert streamed["command"].startswith("outcore launch --hosts local,localhost -- bench model --modes outcore")
    for row, resident in ((whole, 2), (streamed, 0)):
        assert row["error"] is None and row["tokens"] == alone.tokens and row["decode_tps"]["n"] == 1
        assert [part["resident"] for part in row["ranks"]] == [resident] * 2
        assert row["ceiling_s"] is None, "of one disk of two"
    assert streamed["engine_bytes_per_token"] > 0 == (whole["engine_bytes_per_token"] or 0)
    assert refused["error"].startswith("rank 0 (local): ") and "the smallest" in refused["error"]


def test_packed_copies_are_measured_too(tmp_path: Path) -> None:
    folder = zoo.save_checkpoint("llama", tmp_path / "model")
    asked = BenchSettings(("outcore",), (), ("0",), run=RunSettings(tokens=2, prompt_tokens=8, repeats=1, warmup=0))
    original, packed = (
        measure(make_jobs(asked, str(f), 4, fits=False)[0])
        for f in (folder, pack_model(folder, tmp_path / "whole").folder)
    )
    assert packed.tokens == original.tokens


@pytest.mark.parametrize("words", [["--modes", "outcore,plain"], ["--modes", "mlx-lm"], ["--batch", "1,4"]])
def test_what_cannot_be_shared_is_refused_by_name(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "--hosts", "local,local", "--", "bench", "m", *words]) == 2
    assert f"{words[0]} {words[1]}: not over several machines" in capsys.readouterr().err


def test_a_run_beside_has_a_key_of_its_own_and_the_same_ranks() -> None:
    seen: dict[int, list[dict[str, str]]] = {0: [], 1: []}

    def ask(link: Any) -> list[bytes]:
        with run_beside(link, "one") as (variables, descriptors):
            environment = dict(variables)
            seen[link.rank].append(environment)
            # What inherits descriptors has copies of its own.
            copies = [os.dup(fd) for fd in descriptors]
            key = os.read(os.dup(copies[1]), 4096)
            back, write = os.pipe()
            os.write(write, key)
            os.close(write)
            mine = environment | {names.FD: str(copies[0]), names.KEY_FD: str(back), names.PARENT: str(os.getppid())}
            beside = from_environment(mine, leave=None)
            assert beside is not None and beside.identity.key == key != link.identity.key
            try:
                return [*beside.gather(f"{beside.rank} {beside.host}".encode()), key]
            finally:
                beside.close()
                link.gather(b"")

    with linked(2, start=10.0) as links:
        first, second = in_threads([lambda link=link: ask(link) for link in links])  # type: ignore[misc]
    assert first == second and first[:2] == [b"0 host0", b"1 host1"]
    assert first[2].decode() not in json.dumps(seen)


def test_an_error_is_told_as_whose_it_is() -> None:
    link: Any = SimpleNamespace(size=3, identity=SimpleNamespace(who=lambda rank: f"rank {rank} (h{rank})"))
    gone = "rank 2 (h2): its connection broke"
    for errors, says in (
        ([gone, "", KILLED], f"rank 2 (h2): {KILLED}"),
        (["too small", "too small", "too small"], "rank 0 (h0): too small"),
        (["broken", gone, KILLED], f"rank 2 (h2): {KILLED}"),
        (["", gone, ""], gone),
    ):
        assert _first(errors, link) == says
