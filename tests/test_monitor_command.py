"""``outcore monitor``: what it prints, and its view in a terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from interrupts import heard
from outcore.cli.main import main
from outcore.monitoring import publisher
from outcore_tools import processes as monitor
from outcore_tools.processes import STATES, look, read_all, view
from watching import made_up, own_folder, until


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where this process, and the one that started it, have left made-up snapshots."""
    monkeypatch.setattr(monitor, "EVERY_S", 0.01)
    with own_folder() as made:
        made.mkdir(mode=0o700)
        write(made, os.getpid())
        yield made


def write(folder: Path, pid: int, command: str = "chat", *names: str) -> None:
    """Leave a snapshot of a process with models of these names."""
    models = [made_up(name=name)["models"][0] for name in names] or made_up()["models"]
    publisher.write(folder / f"{pid}.json", made_up() | {"pid": pid, "command": command, "models": models})


def drawn(what: Any, width: int = 100) -> str:
    console = Console(width=width, file=io.StringIO(), record=True, color_system=None)
    console.print(what)
    return console.export_text()


@pytest.mark.parametrize("width", [40, 78, 150])
def test_a_snapshot_is_drawn_with_what_it_says(width: int) -> None:
    process = made_up()
    (model,) = process["models"]
    text = drawn(view(process, model), width)
    assert max(map(len, text.splitlines())) <= width
    words = " ".join(text.split())
    for said in ("working", "tiny [b]model[/b]", "3 in memory", "1 computing", "1 shed", "126 of 200", "pass 12"):
        assert said in words or width == 40, said
    for number in ("3.21 of 3.70 GB/s", "1.25", "2.50 per pass", "3.20 GB of 4.00 GB", "25%"):
        assert number in words or width == 40, number
    strip = next(line for line in text.splitlines() if STATES["c"][0] in line)
    order = [code for code in "mcrld" if STATES[code][0] in strip]
    places = [strip.index(STATES[code][0]) for code in order]
    assert order == list("mcrld") and places == sorted(places)


def test_a_model_of_hundreds_of_layers_and_one_that_streams_nothing_are_drawn() -> None:
    (many,) = made_up(layers="md" * 120, head="")["models"]
    assert drawn(view(made_up(), many), 78).count(STATES["m"][0]) >= 120
    (whole,) = made_up(layers="m" * 4, head="", drafts={"source": None, "drafted": 0, "accepted": 0}, notes=[])[
        "models"
    ]
    whole |= {"disk": whole["disk"] | {"how": "none", "ceiling_gbps": None, "gbps": None, "stalled": None}}
    whole |= {"tokens": dict.fromkeys(whole["tokens"], None) | {"made": 14, "per_s": 0.0, "sweeps": 0, "in_sweep": 0}}
    text = drawn(view(made_up(), whole), 78)
    assert "nothing is streamed" in text and "no notes" in text
    assert "– tokens/s" in text and "14 tokens" in text and "pass" not in text


def test_snapshots_are_printed_a_line_each_until_the_process_ends(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = iter(range(100))

    def few() -> list[dict[str, Any]]:
        return read_all() if next(looks) < 4 else []

    monkeypatch.setattr(monitor, "read_all", few)
    assert main(["monitor", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 4 and all(line["pid"] == os.getpid() and line["command"] == "chat" for line in lines)
    assert lines[0]["models"][0]["layers"] == "mmcrlddm"


def test_without_a_terminal_it_is_shown_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["monitor"]) == 0
    out = capsys.readouterr().out
    assert "126 of 200 accepted" in out and f"process {os.getpid()}" in out


def test_what_cannot_be_shown_is_reported_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with own_folder() as folder:
        assert main(["monitor"]) == 1
        assert "no Outcore process of yours is running" in capsys.readouterr().err
        assert "no Outcore process of yours is running" in drawn(look())
        folder.mkdir(mode=0o755)
        assert main(["monitor"]) == 1
        assert "chmod 700" in capsys.readouterr().err
        assert "chmod 700" in " ".join(drawn(look()).split())


# In a terminal


def test_processes_come_and_go(folder: Path) -> None:
    write(folder, os.getpid(), "chat", "alpha", "beta")
    text = drawn(look())
    assert "alpha" in text and "beta" in text and "gamma" not in text
    write(folder, os.getppid(), "batch", "gamma")
    text = drawn(look())
    assert f"batch · process {os.getppid()}" in text and all(name in text for name in ("alpha", "beta", "gamma"))
    assert "3.21 of 3.70 GB/s" in text and "1.25 tokens/s" in text and "pass 12" in text and "Ctrl-C" in text
    (folder / f"{os.getpid()}.json").unlink()
    text = drawn(look())
    assert "gamma" in text and "chat" not in text


def test_the_view_takes_a_terminal_over_and_gives_it_back(folder: Path) -> None:
    main_end, end = pty.openpty()
    environment = os.environ | {"XDG_RUNTIME_DIR": str(folder.parent), "PYTHONPATH": os.pathsep.join(sys.path)}
    environment |= {"TERM": "xterm", "COLUMNS": "100"}
    with heard():
        process = subprocess.Popen(
            [sys.executable, "-m", "outcore", "monitor"], env=environment, stdin=end, stdout=end, stderr=-1
        )
    os.close(end)
    shown = b""

    def read(wanted: bytes) -> bool:
        nonlocal shown
        shown += os.read(main_end, 1 << 16)
        return wanted in shown

    with process:
        try:
            until(lambda: read(b"tokens/s"))
            process.send_signal(signal.SIGINT)
            until(lambda: read(b"\x1b[?1049l"))
            assert process.wait(60) == 0 and process.stderr is not None and process.stderr.read() == b""
        finally:
            process.kill()
            os.close(main_end)
