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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

import rank_work
from fake_ssh import behind
from outcore.cli.main import main
from rank_processes import RankProcesses

ASK = ["-p", "def read_lines(path):", "--ignore-chat-template", "--seed", "1"]
STREAMED = ["--memory", "30MB", "--resident", "0", "--draft", "none"]


@pytest.fixture(scope="module")
def spoken(quick_models: Callable[[int], Path], demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four random layers and a chat template: what ranks say to each other does not depend on sense."""
    folder = tmp_path_factory.mktemp("ranks") / "spoken"
    shutil.copytree(quick_models(4), folder)
    shutil.copy(demo_model / "chat_template.jinja", folder)
    return folder


def by_one(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What the command prints on one machine, which needs no process of its own."""
    assert main([*words]) == 0
    return capsys.readouterr().out


def test_several_ranks_give_one_ranks_text(spoken: Path, two: RankProcesses, capsys: Any) -> None:
    """Of three ranks, and without drafts, test_ranks.py. Of processes of their own,
    test_several_ranks_hold_one_conversation."""
    words = ["generate", "--model", str(spoken), *ASK, "-m", "6", "--memory", "80MB", "--temp", "1", "--json"]
    words += ["--draft", "self:3"]
    one = json.loads(by_one(capsys, *words))
    (status, out, err), other = two.run(rank_work.command, words)
    assert status == 0 and other == (0, "", ""), "the first one prints"
    several = json.loads(out)
    assert several["tokens"] == one["tokens"] and len(one["tokens"]) == 6 and several["text"] in err
    # What the first line tells is not told again.
    assert "layers are this machine's" not in err
    assert several["draft"] == one["draft"]
    foreseen = several["shared"]
    assert [part["host"] for part in foreseen["ranks"]] == ["host0", "host1"] and "shared" not in one
    assert err.count("2 machines share the layers") == 1
    assert foreseen["predicted_token_s"] > 0 < foreseen["predicted_ttft_s"] and foreseen["latency_s"] > 0


def test_a_plan_over_several_ranks(spoken: Path, two: RankProcesses) -> None:
    """A line for each rank is printed, by the first."""
    words = ["plan", str(spoken), *STREAMED, "--context", "200", "--no-calibrate"]
    (status, out, _), other = two.run(rank_work.command, words)
    assert status == 0 and other == (0, "", "")
    assert "on 2 machines: predicted" in out.splitlines()[0]
    rows = re.findall(r"^rank (\d) \(host[01]\): (\d+) layers, ", out, re.MULTILINE)
    assert [rank for rank, _ in rows] == ["0", "1"] and sum(int(layers) for _, layers in rows) == 4
    assert "Layers lie in " in out


BROKEN = """
import os, sys
from types import ModuleType
from outcore.errors import ReadError

def run(args):
    if os.environ["BROKEN"] == str(args.ranks.rank):
        raise ReadError("layer 3: the disk is gone")
    args.ranks.gather(b"")

# Importing what computes takes a second.
for name, held in ("outcore_cluster.group", lambda link, host: link), ("outcore.cli.generate", run):
    sys.modules[name] = module = ModuleType(name)
    setattr(module, "run" if held is run else "RankGroup", held)
"""


@pytest.fixture
def broken(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, str]]:
    """How a launch of two ranks ends, one of which fails: the launcher's status, and what is written."""
    (tmp_path / "sitecustomize.py").write_text(BROKEN)
    monkeypatch.setattr(sys, "stdin", io.StringIO())

    def run(rank: int, *where: str) -> tuple[int, str, str]:
        given = ["--env", f"BROKEN={rank}", "--env", f"PYTHONPATH={tmp_path}"]
        return main(["launch", *where, *given, "--", "generate", "--model", "m", "-p", "hi"]), *capfd.readouterr()

    return run


def test_what_ends_one_rank_is_reported_by_all(broken: Any) -> None:
    began = time.monotonic()
    status, _, said = broken(1, "--hosts", "local,local")
    assert status == 1 and time.monotonic() - began < 100
    assert "outcore generate: rank 1 (local): layer 3: the disk is gone\n" in said


def test_what_the_first_rank_finds_is_reported_once(broken: Any, tmp_path: Path) -> None:
    """Here, and elsewhere with --quiet and --json: it is in the launcher's JSON, and nothing else is printed."""
    says = "layer 3: the disk is gone"
    assert broken(0, "--hosts", "local,local") == (1, "", f"outcore generate: {says}\n")
    status, out, said = broken(0, *behind(tmp_path, ["a", "local"]), "--quiet", "--json")
    found = json.loads(out)
    assert status == 1 and found["error"] == says and found["launch"]["failed"] in (0, 1)
    assert said == f"outcore generate: {says}\n"


def test_ctrl_c_ends_a_text_on_all_ranks(spoken: Path) -> None:
    """What a kill does is test_serve_ranks.py's and test_rank_kills.py's."""
    words = ["generate", "--model", str(spoken), *ASK, *STREAMED, "-m", "3000"]
    command = [sys.executable, "-m", "outcore", "launch", "--hosts", "local,local", "--", *words]
    pipe = subprocess.PIPE
    launcher = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True)
    try:
        assert launcher.stdout is not None
        assert launcher.stdout.readline()
        processes = psutil.Process(launcher.pid).children(recursive=True)
        assert len([p for p in processes if "generate" in p.cmdline()]) == 2
        launcher.send_signal(signal.SIGINT)
        _, errors = launcher.communicate(timeout=60)
    finally:
        launcher.kill()
        launcher.communicate()
    assert launcher.returncode == 130 and "rank" not in errors
    _, alive = psutil.wait_procs(processes, timeout=30)
    assert not alive


CHAT = """
import os, sys
from outcore.cli import answers
from outcore.cli.main import main

most = iter([7, 7, 3000])
if os.environ["MLX_RANK"] == "1":
    answers.most_tokens = lambda *_: next(most)
sys.exit(main(sys.argv[1:]))
"""


def test_several_ranks_hold_one_conversation(
    spoken: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Typed to a first rank elsewhere. An answer is as long as all ranks have room for; Ctrl-C ends one on all of them,
    and not the conversation."""
    words = ["chat", "--model", str(spoken), *STREAMED, "--seed", "1", "--json"]
    said = ["def read_lines(path):", "class Reader:"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n\n".join(said) + "\n"))
    alone = json.loads(by_one(capsys, *words, "--max-tokens", "7").splitlines()[-1])
    script = [sys.executable, "-c", CHAT, *words, "--max-tokens", "3000"]
    command = [sys.executable, "-m", "outcore", "launch", *behind(tmp_path, ["a", "local"]), "--", *script]
    terminal, end_of_it = pty.openpty()
    launcher = subprocess.Popen(
        command,
        stdin=end_of_it,
        stdout=subprocess.PIPE,
        stderr=end_of_it,
        text=True,
        env=os.environ | {"TERM": "xterm"},
        start_new_session=True,
    )
    os.close(end_of_it)
    seen = ""

    def until(text: str, times: int = 1, more: int = 0) -> None:
        nonlocal seen
        end = time.monotonic() + 60
        while seen.count(text) < times or len(seen.rpartition(text)[2]) < more:
            assert time.monotonic() < end and launcher.poll() is None, seen
            if select.select([terminal], [], [], 0.1)[0]:
                try:
                    seen += os.read(terminal, 1000).decode(errors="replace")
                except OSError:  # nobody writes to it any more
                    pytest.fail(f"it has ended: {seen}")

    try:
        until("/help lists commands")
        for number, line in enumerate(said, 1):
            os.write(terminal, f"{line}\n".encode())
            until("in the conversation\r\n", number)
        os.write(terminal, b"import os\n")
        until("begins a new one\r\n", 2, more=20)  # the answer has begun: what is typed and told before it is shorter
        launcher.send_signal(signal.SIGINT)
        until("in the conversation\r\n", 3)
        os.write(terminal, b"q\n")
        assert launcher.stdout is not None
        shared = json.loads(launcher.stdout.read().splitlines()[-1])
        assert launcher.wait(60) == 0, seen
    finally:
        launcher.kill()
        launcher.communicate()
        os.close(terminal)
    assert [len(turn["tokens"]) for turn in shared["turns"]][:2] == [7, 7]
    assert [turn["tokens"] for turn in shared["turns"]][:2] == [turn["tokens"] for turn in alone["turns"]]
    *_, third = [line for line in seen.splitlines() if "answer of" in line]
    assert ", stopped," in third and len(shared["turns"]) == 3
    # It is seen what to type; what is refused is not offered.
    assert seen.count("2 machines share the layers") == 1 and "layers are this" not in seen
    assert "/help lists commands" in seen and "Esc Enter" not in seen and "/save" not in seen


def test_a_line_that_one_machine_has_no_room_for_is_no_other_lines_harm(
    spoken: Path, two: RankProcesses, tmp_path: Path
) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    asked = {"small": 3, "huge": 10**8, "another": 5}
    lines = [
        {"custom_id": n, "method": "POST", "url": "/v1/completions", "body": {"prompt": "def f", "max_tokens": m}}
        for n, m in asked.items()
    ]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["batch", "--model", str(spoken), "-i", str(source), "-o", str(output), "--memory", "30MB"]
    (status, _, err), other = two.run(rank_work.command, words)
    found = {row["custom_id"]: row for row in map(json.loads, output.read_text().splitlines())}
    assert status == other[0] == 0 and found.keys() == asked.keys(), err
    assert found["huge"]["error"]["code"] == "insufficient_memory"
    for name in ("small", "another"):
        assert found[name]["response"]["body"]["usage"]["completion_tokens"] == asked[name]
