"""Models that mean ill: what they say to a terminal, and what lies in the place of their configuration."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outcore.checkpoint.positions import config_of
from outcore.cli import answers, generate
from outcore.cli.main import main
from outcore.errors import CheckpointError

CLIPBOARD = "a\x1b]52;c;ZXZpbA==\x07b\tc\nd\x9b31m\x7f\re\u200d\U0001f469"
SHOWN = "a\\x1b]52;c;ZXZpbA==\\x07b\tc\nd\\x9b31m\\x7f\\re\u200d\U0001f469"


class Screen(io.StringIO):
    """Standard output, on a terminal or not."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


@pytest.fixture(scope="module")
def talking(quick_models: Callable[[int], Path], demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two random layers and a chat template: others' words are put into its mouth."""
    folder = shutil.copytree(quick_models(2), tmp_path_factory.mktemp("models") / "talking")
    shutil.copy(demo_model / "chat_template.jinja", folder)
    return folder


@pytest.mark.parametrize(("command", "terminal"), [("generate", True), ("generate", False), ("chat", True)])
def test_what_a_model_says_moves_no_terminal(
    command: str, terminal: bool, talking: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its escape sequences are shown there as text; a pipe gets all bytes as they are."""
    module: Any = generate if command == "generate" else answers
    plain = module.stream_generate

    def evil(*args: Any, **options: Any) -> Iterator[Any]:
        texts = list(CLIPBOARD)
        for n, response in enumerate(plain(*args, **options)):
            yield replace(response, text=texts[n] if n < len(texts) else "")

    screen = Screen(terminal)
    monkeypatch.setattr(module, "stream_generate", evil)
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setattr("sys.stdin", io.StringIO("say it\n"))
    flags = ["--model", str(talking), "--memory", "60MB", "--max-tokens", "40", "--temp", "0"]
    assert main([command, *flags, *(["--prompt", "say it"] if command == "generate" else [])]) == 0
    assert (SHOWN if terminal else CLIPBOARD) in screen.getvalue()
    assert terminal is not ("\x1b" in screen.getvalue())


@pytest.mark.parametrize("what", ["a pipe", "/dev/zero"])
def test_what_is_no_file_is_not_opened_as_a_configuration(
    what: str, demo_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By no command: a pipe would be waited for, and zeros read without end."""
    for file in demo_model.iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = tmp_path / "config.json"
    config.unlink()
    if what == "a pipe":
        os.mkfifo(config)
    else:
        config.symlink_to(what)
    with pytest.raises(CheckpointError, match="not a regular file"):
        config_of(tmp_path)
    for words in (["generate", "--prompt", "x"], ["chat"], ["info"], ["serve"]):
        name = [str(tmp_path)] if words[0] in ("info", "serve") else ["--model", str(tmp_path)]
        assert main([words[0], *name, *words[1:], *(["--port", "0"] if words == ["serve"] else [])]) != 0
        assert "config.json: cannot be read (not a regular file)" in capsys.readouterr().err, words
