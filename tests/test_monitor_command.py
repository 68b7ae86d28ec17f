"""``outcore monitor``: what it prints, and its view in a terminal."""

from __future__ import annotations

import asyncio
import io
import json
import os
import types
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from outcore.cli import monitor
from outcore.cli.main import main
from outcore.cli.monitor_app import Confirm, Monitor
from outcore.cli.monitor_view import STATES, View
from outcore.engine.observers import Observers
from outcore.monitoring import publish
from outcore.monitoring.board import Board
from outcore.monitoring.publisher import board, staying
from watching import made_up, own_folder, until

HELLO = {"pid": 7, "command": "chat", "models": ["tiny"]}


class Session:
    """As much of a model as is needed to be seen."""

    def __init__(self) -> None:
        self.closed, self.passing, self.closing, self.metrics = False, Observers(), Observers(), None


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    """This process tells a made-up snapshot."""
    session = Session()
    monkeypatch.setattr(Board, "snapshot", lambda self: made_up() | {"frozen": self.gate.closed})
    with own_folder():
        assert publish(types.SimpleNamespace(outcore=session), "chat", "tiny")
        yield session
        session.closing()


def drawn(view: View, width: int) -> str:
    console = Console(width=width, file=io.StringIO(), record=True, color_system=None)
    console.print(view.whole())
    return console.export_text()


@pytest.mark.parametrize("width", [40, 78, 150])
def test_a_snapshot_is_drawn_with_what_it_says(width: int) -> None:
    (model,) = made_up()["models"]
    text = drawn(View(HELLO, model), width)
    assert max(map(len, text.splitlines())) <= width
    words = " ".join(text.split())
    for said in ("working", "tiny [b]model[/b]", "3 in memory", "1 computing", "1 shed", "126 of 200", "pass 12"):
        assert said in words or width == 40, said
    for number in ("3.21 of 3.70 GB/s", "1.25", "2.50 a sweep", "3.20 GB of 4.00 GB", "25%"):
        assert number in words or width == 40, number
    strip = next(line for line in text.splitlines() if STATES["c"][0] in line)
    order = [code for code in "mcrld" if STATES[code][0] in strip]
    places = [strip.index(STATES[code][0]) for code in order]
    assert order == list("mcrld") and places == sorted(places)
    assert "frozen" in drawn(View(HELLO, model, frozen=True), width)


def test_a_model_of_hundreds_of_layers_and_one_that_streams_nothing_are_drawn() -> None:
    (many,) = made_up(layers="md" * 120, head="")["models"]
    assert drawn(View(HELLO, many), 78).count(STATES["m"][0]) >= 120
    (whole,) = made_up(layers="m" * 4, head="", drafts={"source": None, "drafted": 0, "accepted": 0}, notes=[])[
        "models"
    ]
    whole |= {"disk": whole["disk"] | {"how": "none", "ceiling_gbps": None, "gbps": None, "stalled": None}}
    whole |= {"tokens": dict.fromkeys(whole["tokens"], None) | {"made": 0, "sweeps": 0, "in_sweep": 0}}
    text = drawn(View(HELLO, whole), 78)
    assert "nothing is streamed" in text and "no notes" in text


def test_snapshots_are_printed_a_line_each_until_the_process_ends(
    seen: Session, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    count = iter(range(100))

    def few(self: Board) -> dict[str, Any]:
        if next(count) == 3:
            board._recorders.clear()
            sockets_gone()
        return made_up()

    def sockets_gone() -> None:
        from outcore.monitoring import publisher

        assert publisher._publisher is not None
        publisher._publisher.nudge()

    monkeypatch.setattr(Board, "snapshot", few)
    assert main(["monitor", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 4 and all(line["pid"] == os.getpid() and line["command"] == "chat" for line in lines)
    assert lines[0]["models"][0]["layers"] == "mmcrlddm"


def test_once_shows_it_once(seen: Session, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "SETTLED", 2)
    assert main(["monitor", "--once"]) == 0
    out = capsys.readouterr().out
    assert "126 of 200 right" in out and f"process {os.getpid()}" in out
    assert main(["monitor", "--once", "--json", "--pid", str(os.getpid())]) == 0
    (process,) = json.loads(capsys.readouterr().out)["processes"]
    assert process["command"] == "chat" and process["models"][0]["name"] == "tiny [b]model[/b]"


def test_a_process_that_has_no_model_yet_is_seen(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(app: Monitor, pilot: Any) -> None:
        await comes(pilot, lambda: "no model is loaded" in shown(app))
        assert f"serve {os.getpid()}" in shown(app)

    monkeypatch.setattr(monitor, "SETTLED", 2)
    with own_folder() as folder:
        with staying("serve"):
            assert main(["monitor", "--once"]) == 0
            assert f"serve · process {os.getpid()}: no model is loaded\n" in capsys.readouterr().out
            in_terminal(test)
            session = Session()
            assert publish(types.SimpleNamespace(outcore=session), "serve", "tiny")
            session.closing()  # the last model leaves, and the process stays
            assert main(["monitor", "--once"]) == 0
        until(lambda: not list(folder.iterdir()))


def test_what_cannot_be_shown_is_told_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with own_folder() as folder:
        assert main(["monitor", "--once"]) == 1
        assert "no Outcore process of yours runs" in capsys.readouterr().err
        assert main(["monitor", "--json", "--pid", "3"]) == 1
        assert "no Outcore process of yours has number 3" in json.loads(capsys.readouterr().out)["error"]
        assert main(["monitor"]) == 2
        assert "outcore monitor: standard output is no terminal" in capsys.readouterr().err
        folder.mkdir(mode=0o755)
        assert main(["monitor", "--once"]) == 1
        assert "chmod 700" in capsys.readouterr().err
    monkeypatch.setitem(__import__("sys").modules, "outcore.cli.monitor_app", None)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert main(["monitor"]) == 2
    err = capsys.readouterr().err
    assert "pip install 'outcore[monitor]'" in err and err.count("\n") == 1


# In a terminal


def shown(app: Monitor) -> str:
    """What is on the screen, as text."""
    return "\n".join("".join(s.text for s in app.screen._compositor.render_strips()[y]) for y in range(app.size.height))


async def comes(pilot: Any, true: Callable[[], Any]) -> None:
    for _ in range(400):
        if true():
            return
        await pilot.pause(0.02)
    raise AssertionError(shown(pilot.app))


def in_terminal(test: Callable[[Monitor, Any], Awaitable[None]], width: int = 80, height: int = 24) -> None:
    async def run() -> None:
        app = Monitor()
        async with app.run_test(size=(width, height)) as pilot:
            await test(app, pilot)

    asyncio.run(run())


@pytest.mark.parametrize(("width", "height"), [(80, 24), (150, 40)])
def test_all_of_it_fits_a_terminal(seen: Session, width: int, height: int) -> None:
    async def test(app: Monitor, pilot: Any) -> None:
        await comes(pilot, lambda: "126 of 200" in shown(app))
        text = shown(app)
        for said in (
            f"chat {os.getpid()}",
            "working",
            "3.21 of 3.70 GB/s",
            "1.25 tokens/s",
            "pass 12",
            "Freeze",
            "Quit",
        ):
            assert said in text, text
        beside = any("─memory" in line and "─disk" in line for line in text.splitlines())
        assert beside == (width == 150), text

    in_terminal(test, width, height)


def test_f_holds_the_process_up_and_lets_it_go_on(seen: Session) -> None:
    async def test(app: Monitor, pilot: Any) -> None:
        await comes(pilot, lambda: "working" in shown(app))
        await pilot.press("f")
        await comes(pilot, lambda: board.gate.closed and "frozen" in shown(app))
        await pilot.press("f")
        await comes(pilot, lambda: not board.gate.closed and "working" in shown(app))
        await pilot.press("f")
        await comes(pilot, lambda: board.gate.closed)

    in_terminal(test)
    until(lambda: not board.gate.closed), "a view that is gone holds nothing up"


def test_k_ends_the_process_when_it_is_sure(seen: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(Board, "_interrupt", lambda self: ended.append(1))

    async def test(app: Monitor, pilot: Any) -> None:
        await comes(pilot, lambda: "working" in shown(app))
        await pilot.press("k")
        await comes(pilot, lambda: "as Ctrl-C would" in shown(app))
        await pilot.press("n")
        await comes(pilot, lambda: not isinstance(app.screen, Confirm))
        assert not ended
        await pilot.press("k")
        await comes(pilot, lambda: isinstance(app.screen, Confirm))
        await pilot.press("y")
        await comes(pilot, lambda: ended)
        await pilot.press("k")
        await comes(pilot, lambda: "it was asked before" in shown(app))

    in_terminal(test)


def test_processes_come_and_go_and_tab_switches_between_models(seen: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    two = made_up()
    two["models"] = [made_up(name="alpha")["models"][0], made_up(name="beta")["models"][0]]
    monkeypatch.setattr(Board, "snapshot", lambda self: two)
    monkeypatch.setattr("outcore.cli.monitor_app.LOOK_S", 0.05)

    async def test(app: Monitor, pilot: Any) -> None:
        await comes(pilot, lambda: "alpha" in shown(app))
        await pilot.press("tab")
        await comes(pilot, lambda: "beta" in shown(app))
        await pilot.press("left")
        await comes(pilot, lambda: "alpha" in shown(app))
        await asyncio.to_thread(seen.closing)
        await comes(pilot, lambda: "No Outcore process of yours runs" in shown(app))
        again = Session()
        publish(types.SimpleNamespace(outcore=again), "batch", "tiny")
        await comes(pilot, lambda: f"batch {os.getpid()}" in shown(app) and "alpha" in shown(app))
        again.closing()
        await pilot.press("q")

    in_terminal(test)


def test_a_folder_that_is_not_this_users_alone_is_told(tmp_path: Path) -> None:
    async def test(app: Monitor, pilot: Any) -> None:
        await comes(pilot, lambda: "chmod 700" in shown(app).replace("\n", " "))

    with own_folder() as folder:
        folder.mkdir(mode=0o755)
        in_terminal(test)
