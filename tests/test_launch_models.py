"""``outcore launch -- generate``: one rank's text from several, and one end for all of them."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

from fake_ssh import behind
from outcore.cli.main import main

ASK = ["--memory", "16MB", "-p", "def read_lines(path):", "--ignore-chat-template", "--seed", "1"]


@pytest.fixture(scope="module")
def spoken(served: Path, demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six random layers and a chat template: what ranks say to each other does not depend on sense."""
    folder = tmp_path_factory.mktemp("ranks") / "spoken"
    shutil.copytree(served, folder)
    shutil.copy(demo_model / "chat_template.jinja", folder)
    return folder


def outcore(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "outcore", *words], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120
    )


def by_one(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What the command prints on one machine, which needs no process of its own."""
    assert main([*words]) == 0
    return capsys.readouterr().out


def test_several_ranks_give_one_ranks_text(spoken: Path, capsys: Any) -> None:
    """Of three ranks, and without drafts, test_ranks.py."""
    more = ["--memory", "80MB", "--draft", "self:3", "--temp", "1"]
    words = ["generate", "--model", str(spoken), *ASK, "-m", "8", *more, "--json"]
    alone = by_one(capsys, *words)
    shared = outcore("launch", "--hosts", "local", "-n", "2", "--", *words)
    assert shared.returncode == 0, shared.stderr
    # Standard output holds one line: of the first rank.
    one, several = json.loads(alone), json.loads(shared.stdout)
    assert several["tokens"] == one["tokens"] and len(one["tokens"]) == 8
    # What the first line tells is not told again.
    assert "layers are this machine's" not in shared.stderr
    assert several["draft"] == one["draft"]
    foreseen = several["shared"]
    assert [part["host"] for part in foreseen["ranks"]] == ["local"] * 2 and "shared" not in one
    assert "2 machines share the layers" in shared.stderr.splitlines()[0]
    assert foreseen["predicted_token_s"] > 0 < foreseen["predicted_ttft_s"] and foreseen["latency_s"] > 0


@pytest.mark.parametrize("first", ["a"])
def test_a_quiet_launcher_prints_only_what_went_wrong(first: str, spoken: Path, tmp_path: Path) -> None:
    words = ["launch", *behind(tmp_path, [first, "local"]), "--quiet", "--", "generate"]
    words += ["--model", str(spoken), *ASK]
    refused = outcore(*words, "-m", "0")
    assert refused.returncode == 2 and refused.stdout == "" and "--max-tokens 0: give at least 1" in refused.stderr


@pytest.mark.parametrize("first", ["local"])
def test_the_launchers_json_has_the_answer(first: str, spoken: Path, tmp_path: Path) -> None:
    """Of a first rank here and elsewhere; where it fails, what went wrong. The text is told meanwhile."""
    words = ["launch", *behind(tmp_path, [first, "local"]), "--json", "--", "generate"]
    words += ["--model", str(spoken), *ASK, "-m", "8"]
    done = outcore(*words)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found["tokens"]) == 8 and found["text"] in done.stderr and found["shared"]["ranks"]
    assert [rank["exit_status"] for rank in found["launch"]["ranks"]] == [0, 0]
    failed = outcore(*words, "--memory", "1MB")
    assert failed.returncode == 1
    found = json.loads(failed.stdout)
    assert found["type"] == "BudgetError" and "too small" in found["error"] and found["launch"]["failed"] in (0, 1)


def test_a_plan_over_several_ranks(spoken: Path) -> None:
    """A line for each rank is printed, by the first. A flag about one machine is refused."""
    words = ["plan", str(spoken), "--memory", "20MB", "--context", "200", "--no-calibrate"]
    done = outcore("launch", "--hosts", "local,local", "--", *words)
    assert done.returncode == 0, done.stderr
    assert "on 2 machines: predicted" in done.stdout.splitlines()[0]
    rows = re.findall(r"^rank (\d) \(local\): (\d+) layers, ", done.stdout, re.MULTILINE)
    assert [rank for rank, _ in rows] == ["0", "1"] and sum(int(layers) for _, layers in rows) > 2
    assert "Layers lie in " in done.stdout


RUN = """
import os, sys
from outcore.cli import generate
from outcore.cli.main import main
from outcore.errors import ReadError

def broken(args):
    raise ReadError("layer 3: the disk is gone")

if os.environ["MLX_RANK"] == "1":
    generate.run = broken
sys.exit(main(sys.argv[1:]))
"""


def test_what_ends_one_rank_is_told_by_all(spoken: Path) -> None:
    words = ["generate", "--model", str(spoken), *ASK, "-m", "1000"]
    began = time.monotonic()
    done = outcore("launch", "--hosts", "local,local", "--", sys.executable, "-c", RUN, *words)
    assert done.returncode == 1 and time.monotonic() - began < 20
    assert "rank 1 (local): layer 3: the disk is gone" in done.stderr
    assert "rank 1 (local): outcore generate: layer 3: the disk is gone" in done.stderr


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGINT])
def test_a_run_that_is_disturbed_ends_on_all_ranks(sign: signal.Signals, spoken: Path) -> None:
    words = ["generate", "--model", str(spoken), *ASK, "--memory", "30MB", "--resident", "0", "-m", "3000"]
    command = [sys.executable, "-m", "outcore", "launch", "--hosts", "local,local", "--", *words]
    pipe = subprocess.PIPE
    launcher = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True)
    try:
        assert launcher.stdout is not None
        assert launcher.stdout.readline()
        processes = psutil.Process(launcher.pid).children(recursive=True)
        ranks = [p for p in processes if "generate" in p.cmdline()]
        assert len(ranks) == 2
        if sign == signal.SIGKILL:
            next(p for p in ranks if p.environ()["MLX_RANK"] == "1").kill()
        else:
            launcher.send_signal(sign)
        _, errors = launcher.communicate(timeout=10)
    finally:
        launcher.kill()
    assert launcher.returncode == {signal.SIGKILL: 1, signal.SIGINT: 130}[sign]
    assert ("rank 1 (local)" in errors) == (sign == signal.SIGKILL)
    _, alive = psutil.wait_procs(processes, timeout=2)
    assert not alive


def test_several_ranks_hold_one_conversation(spoken: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["chat", "--model", str(spoken), "--memory", "24MB", "--max-tokens", "4", "--seed", "1", "--json"]
    said = "def read_lines(path):\n\nclass Reader:\nh\n"
    run = {"input": said, "capture_output": True, "text": True, "timeout": 120}
    monkeypatch.setattr(sys, "stdin", io.StringIO(said))
    alone = json.loads(by_one(capsys, *words).splitlines()[-1])
    several = subprocess.run([sys.executable, "-m", "outcore", "launch", "--hosts", "local,local", "--", *words], **run)
    assert several.returncode == 0, several.stderr
    shared = json.loads(several.stdout.splitlines()[-1])
    assert len(alone["turns"]) == 2 and shared["tokens"] == alone["tokens"]
    assert several.stderr.count("2 machines share the layers") == 1 and "layers are this" not in several.stderr
    # What is refused is not offered.
    assert "h this help" in several.stderr and "/save" not in several.stderr


def test_whoever_types_to_a_first_rank_elsewhere_sees_that_it_starts_and_what_to_type(
    spoken: Path, tmp_path: Path
) -> None:
    terminal, end_of_it = pty.openpty()
    words = ["launch", *behind(tmp_path, ["a", "local"]), "--", "chat", "--model", str(spoken), "--memory", "24MB"]
    launcher = subprocess.Popen(
        [sys.executable, "-m", "outcore", *words],
        stdin=end_of_it,
        stdout=end_of_it,
        stderr=end_of_it,
        env=os.environ | {"TERM": "xterm"},
        start_new_session=True,
    )
    os.close(end_of_it)
    seen, end = "", time.monotonic() + 60
    while "each line is a message" not in seen and time.monotonic() < end and launcher.poll() is None:
        if select.select([terminal], [], [], 0.1)[0]:
            seen += os.read(terminal, 1000).decode(errors="replace")
    os.write(terminal, b"q\n")
    try:
        assert launcher.wait(30) == 0
    finally:
        launcher.kill()
        os.close(terminal)
    waits, _, told = seen.partition("2 machines share")
    assert "waiting for a" in waits and "waiting for a" not in told
    assert "q quit" in told and "each line is a message" in told and "Esc Enter" not in told


@pytest.mark.parametrize("first", ["local"])
def test_a_draft_that_there_is_not_is_told_once(first: str, spoken: Path, tmp_path: Path) -> None:
    where = behind(tmp_path, [first, "local"])
    draft = str(tmp_path / "none")
    done = outcore("launch", *where, "--", "generate", "--model", str(spoken), *ASK, "--draft", draft)
    assert done.returncode == 1 and done.stderr.count(draft) == 1 == done.stderr.count("\n"), done.stderr


def test_what_the_first_rank_finds_is_told_once(spoken: Path, tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").write_text("\n")
    (tmp_path / "in.jsonl").write_text("{}\n")
    words = ["batch", "--model", str(spoken), "--input", str(tmp_path / "in.jsonl")]
    done = outcore("launch", "--hosts", "local,local", "--", *words, "--output", str(tmp_path / "out.jsonl"))
    assert done.returncode in (1, 2) and done.stderr.startswith("outcore batch: --output"), done.stderr
    assert done.stderr.count("\n") == 1


def test_a_line_that_one_machine_has_no_room_for_is_no_other_lines_harm(spoken: Path, tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    asked = {"small": 3, "huge": 10**8, "another": 5}
    lines = [
        {"custom_id": n, "method": "POST", "url": "/v1/completions", "body": {"prompt": "def f", "max_tokens": m}}
        for n, m in asked.items()
    ]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["batch", "--model", str(spoken), "-i", str(source), "-o", str(output), "--memory", "16MB"]
    done = outcore("launch", "--hosts", "local,local", "--", *words)
    found = {row["custom_id"]: row for row in map(json.loads, output.read_text().splitlines())}
    assert done.returncode == 0 and found.keys() == asked.keys(), done.stderr
    assert found["huge"]["error"]["code"] == "insufficient_memory"
    for name in ("small", "another"):
        assert found[name]["response"]["body"]["usage"]["completion_tokens"] == asked[name]


CHAT = """
import os, sys
from outcore.cli import answers
from outcore.cli.main import main

rank, how = os.environ["MLX_RANK"], sys.argv[1]
words = sys.argv[2:]
if how == "unequal" and rank == "1":
    answers.most_tokens = lambda *_: 7
sys.exit(main(words))
"""


def chat_on_two(spoken: Path, how: str, said: str, *more: str) -> subprocess.CompletedProcess[str]:
    words = ["chat", "--model", str(spoken), "--memory", "60MB", "--max-tokens", "40", "--json", *more]
    script = [sys.executable, "-c", CHAT, how, *words]
    launch = [sys.executable, "-m", "outcore", "launch", "--hosts", "local,local", "--", *script]
    return subprocess.run(launch, input=said, capture_output=True, text=True, timeout=240)


def test_an_answer_is_as_long_as_all_ranks_have_room_for(spoken: Path) -> None:
    said = "def read_lines(path):\n" * 2
    done = chat_on_two(spoken, "unequal", said)
    assert done.returncode == 0, done.stderr
    turns = json.loads(done.stdout.splitlines()[-1])["turns"]
    assert [len(turn["tokens"]) for turn in turns] == [7, 7]


def test_ctrl_c_ends_an_answer_of_all_ranks_and_not_the_conversation(spoken: Path) -> None:
    words = ["chat", "--model", str(spoken), "--memory", "24MB", "--resident", "0", "--max-tokens", "120"]
    command = [sys.executable, "-m", "outcore", "launch", "--hosts", "local,local", "--", *words]
    pipe = subprocess.PIPE
    launcher = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    try:
        assert launcher.stdin is not None and launcher.stdout is not None
        launcher.stdin.write("def read_lines(path):\n")
        launcher.stdin.flush()
        assert launcher.stdout.read(1)
        launcher.send_signal(signal.SIGINT)
        out, errors = launcher.communicate("class Reader:\n", timeout=60)
    finally:
        launcher.kill()
    assert launcher.returncode == 0 and out, errors
    first, second = [line for line in errors.splitlines() if "answer of" in line]
    assert ", stopped," in first and "answer of 120" not in first and ", stopped" not in second
