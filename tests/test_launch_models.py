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

from fake_ssh import behind
from outcore.cli.main import main

ASK = ["-p", "def read_lines(path):", "--ignore-chat-template", "--seed", "1"]
STREAMED = ["--memory", "30MB", "--resident", "0", "--draft", "none"]


@pytest.fixture(scope="module")
def spoken(quick_models: Callable[[int], Path], demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four random layers and a chat template: what ranks say to each other does not depend on sense."""
    folder = tmp_path_factory.mktemp("ranks") / "spoken"
    shutil.copytree(quick_models(4), folder)
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
    """Of three ranks, and without drafts, test_ranks.py. The text is printed before the launcher's JSON."""
    words = [
        "generate",
        "--model",
        str(spoken),
        *ASK,
        "-m",
        "6",
        "--memory",
        "80MB",
        "--draft",
        "self:3",
        "--temp",
        "1",
    ]
    one = json.loads(by_one(capsys, *words, "--json"))
    shared = outcore("launch", "--hosts", "local", "-n", "2", "--json", "--", *words)
    assert shared.returncode == 0, shared.stderr
    # Standard output holds one line: of the first rank.
    several = json.loads(shared.stdout)
    assert several["tokens"] == one["tokens"] and len(one["tokens"]) == 6 and several["text"] in shared.stderr
    # What the first line tells is not told again.
    assert "layers are this machine's" not in shared.stderr
    assert several["draft"] == one["draft"]
    foreseen = several["shared"]
    assert [part["host"] for part in foreseen["ranks"]] == ["local"] * 2 and "shared" not in one
    assert "2 machines share the layers" in shared.stderr.splitlines()[0]
    assert foreseen["predicted_token_s"] > 0 < foreseen["predicted_ttft_s"] and foreseen["latency_s"] > 0
    assert [rank["exit_status"] for rank in several["launch"]["ranks"]] == [0, 0]


def test_a_quiet_launchers_json_has_what_went_wrong_and_only_that_is_printed(spoken: Path, tmp_path: Path) -> None:
    """Of a first rank elsewhere, which alone looks for what drafts."""
    draft = str(tmp_path / "none")
    words = ["launch", *behind(tmp_path, ["a", "local"]), "--quiet", "--json", "--", "generate"]
    failed = outcore(*words, "--model", str(spoken), *ASK, "--draft", draft)
    found = json.loads(failed.stdout)
    assert failed.returncode == 1 and draft in found["error"] and found["launch"]["failed"] in (0, 1)
    assert failed.stderr == f"outcore generate: {found['error']}\n"


def test_a_plan_over_several_ranks(spoken: Path, tmp_path: Path) -> None:
    """A line for each rank is printed, by the first. Of one elsewhere a terminal shows that it is waited for."""
    words = ["plan", str(spoken), *STREAMED, "--context", "200", "--no-calibrate"]
    command = [sys.executable, "-m", "outcore", "launch", *behind(tmp_path, ["a", "b"]), "--", *words]
    terminal, end_of_it = pty.openpty()
    with os.fdopen(terminal, "rb", 0) as shown, os.fdopen(end_of_it, "wb", 0) as errors:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True, timeout=120,
            env=os.environ | {"TERM": "xterm"},
        )  # fmt: skip
        seen = shown.read(100_000).decode()
    assert done.returncode == 0 and "waiting for a" in seen, seen
    assert "on 2 machines: predicted" in done.stdout.splitlines()[0]
    rows = re.findall(r"^rank (\d) \([ab]\): (\d+) layers, ", done.stdout, re.MULTILINE)
    assert [rank for rank, _ in rows] == ["0", "1"] and sum(int(layers) for _, layers in rows) == 4
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


def test_what_ends_one_rank_is_reported_by_all(spoken: Path) -> None:
    words = ["generate", "--model", str(spoken), *ASK, *STREAMED, "-m", "1000"]
    began = time.monotonic()
    done = outcore("launch", "--hosts", "local,local", "--", sys.executable, "-c", RUN, *words)
    assert done.returncode == 1 and time.monotonic() - began < 20
    assert "rank 1 (local): layer 3: the disk is gone" in done.stderr
    assert "rank 1 (local): outcore generate: layer 3: the disk is gone" in done.stderr


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
        _, errors = launcher.communicate(timeout=10)
    finally:
        launcher.kill()
    assert launcher.returncode == 130 and "rank" not in errors
    _, alive = psutil.wait_procs(processes, timeout=2)
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
                seen += os.read(terminal, 1000).decode(errors="replace")

    try:
        until("/help lists commands")
        for number, line in enumerate(said, 1):
            os.write(terminal, f"{line}\n".encode())
            until("answer of", number)
        os.write(terminal, b"import os\n")
        until("import os\r\n", more=3)  # the answer has begun
        launcher.send_signal(signal.SIGINT)
        until("answer of", 3)
        os.write(terminal, b"q\n")
        assert launcher.stdout is not None
        shared = json.loads(launcher.stdout.read().splitlines()[-1])
        assert launcher.wait(30) == 0, seen
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


def test_what_the_first_rank_finds_is_reported_once(spoken: Path, tmp_path: Path) -> None:
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
    words = ["batch", "--model", str(spoken), "-i", str(source), "-o", str(output), "--memory", "30MB"]
    done = outcore("launch", "--hosts", "local,local", "--", *words)
    found = {row["custom_id"]: row for row in map(json.loads, output.read_text().splitlines())}
    assert done.returncode == 0 and found.keys() == asked.keys(), done.stderr
    assert found["huge"]["error"]["code"] == "insufficient_memory"
    for name in ("small", "another"):
        assert found[name]["response"]["body"]["usage"]["completion_tokens"] == asked[name]
