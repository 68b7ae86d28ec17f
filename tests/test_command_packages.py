"""What packages bring: commands, the flags that they add to the core's, and APIs."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import httpx
import pytest

from fake_service import FakeService
from outcore import packages
from outcore.cli.commands import commands, parser_of
from outcore.cli.main import main
from outcore.serve.app import all_apis
from scripted import served

GROUP = "outcore.commands"

APIS = """
from outcore.serve.api import Api, ParsedRequest, ResponseWriter, Route
from outcore.serve.events import GenerationRequest, TextPart
class Painting(ResponseWriter):
    def steps(self, event):
        return [event.text] if isinstance(event, TextPart) else []
    def whole(self, events):
        return {"painting": [step for event in events for step in self.steps(event)]}
def paint(request):
    return ParsedRequest((GenerationRequest(prompt=request.body["of"]),), Painting(False))
APIS = (Api("paint", lambda error: {"no": str(error)}, (Route("/paint", paint, "POST"),)),)
"""

COMMANDS = """
from outcore.cli.commands import Command
COMMANDS = {
    "paint": Command("Paint what a model says.", "outcore_paint.work:run", "outcore_paint.work:FLAGS", kind="art"),
    "sculpt": Command("The same in stone.", "outcore_paint.stone:run", "outcore_paint.work:FLAGS", extra="paint"),
    "generate": Command("Another one.", "outcore_paint.work:run", "outcore_paint.work:FLAGS"),
}
FLAGS = {"pack": "outcore_paint.work:add"}
"""

WORK = """
FLAGS = []
def run(args):
    print("painted", getattr(args, "colour", ""))
    return 1
def add(parser):
    parser.add_argument("--colour")
    parser.run = "outcore_paint.work:run"
"""


def forget() -> None:
    packages.modules.cache_clear()
    packages._entry_points.cache_clear()


@pytest.fixture
def paint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package of another distribution."""
    folder = tmp_path / "outcore_paint"
    folder.mkdir()
    for name, text in {"commands": COMMANDS, "apis": APIS, "work": WORK, "stone": "import chisel_of_nobody"}.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    installed = tmp_path / "outcore_paint-1.dist-info"
    installed.mkdir()
    points = f"[{GROUP}]\npaint = outcore_paint.commands\ngone = outcore_gone.commands\n\n[outcore.apis]\n"
    points += "paint = outcore_paint.apis\n"
    (installed / "entry_points.txt").write_text(points)
    forget()
    assert {p.name: p.value for p in entry_points(group=GROUP)}.items() >= packages._entry_points()[GROUP].items()
    yield
    forget()
    for name in [n for n in sys.modules if n.startswith("outcore_paint")]:
        del sys.modules[name]


def test_a_package_brings_commands_and_none_in_place_of_the_cores(
    paint: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["paint"]) == 1 and capsys.readouterr().out == "painted \n"
    assert main(["--help"]) == 0 and "\n\nart:\n  paint         paint what a model says\n" in capsys.readouterr().out
    assert "outcore_paint" not in commands()["generate"].run


def test_a_package_adds_flags_to_a_command_and_does_what_they_ask(
    paint: None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["pack", str(tmp_path), "--colour", "red"]) == 1
    assert capsys.readouterr().out == "painted red\n"
    assert "--colour" not in parser_of("info").format_help()


def test_a_command_says_which_extra_is_missing(paint: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sculpt"]) == 2
    assert "chisel_of_nobody: pip install 'outcore[paint]'" in capsys.readouterr().err


def test_a_package_brings_an_api_in_one_module(paint: None) -> None:
    async def asked(path: str) -> httpx.Response:
        transport = httpx.ASGITransport(served(FakeService(), *all_apis()))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.post(path, json={"of": "a tree"})

    assert asyncio.run(asked("/paint")).json() == {"painting": ["a ", "tree "]}
    assert asyncio.run(asked("/paint/more")).json() == {"no": "/paint/more: no such address"}
    names = ["openai", "openai", "anthropic", "ollama", "openai", "ollama", "llama.cpp", "paint"]
    assert [api.name for api in all_apis()] == names
