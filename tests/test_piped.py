"""The prompt of ``outcore generate``: given, piped in, or both; and a standard input that is somebody else's."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from outcore.cli import piped
from outcore.cli.chat import lines
from outcore.cli.main import main
from outcore.cli.piped import whole_prompt
from outcore.errors import UsageError

WHOLE = "from outcore.cli.piped import whole_prompt as w; import sys; print(repr(w(*sys.argv[1:] or [None])), end='')"
ASK = f'"{sys.executable}" -c "{WHOLE}"'


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.TextIOWrapper]:
    """An open pipe as standard input, to which this process could write."""
    monkeypatch.setattr(piped, "SILENT_MS", 1)
    read, write = os.pipe()
    with os.fdopen(read) as file:
        monkeypatch.setattr("sys.stdin", file)
        with os.fdopen(write, "w") as writer:
            yield writer


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("echo text | ASK", "'text\\n'"),
        ("echo text | ASK 'explain\\n'", "'explain\\n\\n\\ntext\\n'"),
        ("{ sleep 0.3; echo late; } | ASK explain", "'explain\\n\\nlate\\n'"),
        ("ASK explain < file", "'explain\\n\\nof a file\\n'"),
        ("ASK explain < /dev/null", "'explain'"),
        ("ASK explain <&-", "'explain'"),
        (": | ASK explain", "'explain'"),
        ("while read -r line; do ASK \"$line\"; done < lines", "'one''two'"),
    ],
)  # fmt: skip
def test_what_a_shell_pipes_follows_the_prompt(line: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("of a file\n")
    (tmp_path / "lines").write_text("one\ntwo\n")
    shell = {"args": ["bash", "-c", line.replace("ASK", ASK)], "cwd": tmp_path, "capture_output": True, "text": True}
    done = subprocess.run(**shell, start_new_session=True, timeout=60)  # type: ignore[call-overload]
    assert (done.stdout, done.stderr) == (says, "")


@pytest.mark.parametrize("given", ["explain", None, "-"])
def test_a_silent_pipe_is_waited_for_and_says_so(
    given: str | None, silent: io.TextIOWrapper, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever writes late, from another process group or by another descriptor, is heard."""

    def write() -> None:
        silent.write("of ours")
        silent.close()

    late = threading.Timer(0.2, write)
    late.start()
    assert whole_prompt(given) == {"explain": "explain\n\nof ours"}.get(given or "", "of ours")
    late.join()
    assert ("< /dev/null says that there is none" in capsys.readouterr().err) == (given != "-")


@pytest.mark.parametrize("given", [None, "-"])
def test_nothing_piped_is_no_prompt(given: str | None, silent: io.TextIOWrapper) -> None:
    silent.write(" \n")
    silent.close()
    with pytest.raises(UsageError, match="no prompt: give --prompt TEXT, or pipe text in"):
        whole_prompt(given)


def test_more_text_than_a_prompt_can_have_is_read_no_further(
    silent: io.TextIOWrapper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(piped, "MOST", 1_000)
    silent.write("x" * 1_001)  # and it is not closed
    silent.flush()
    with pytest.raises(UsageError, match="standard input has more than"):
        whole_prompt("explain")


def test_a_line_of_a_chat_has_the_bound_of_a_prompt(silent: io.TextIOWrapper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(piped, "MOST", 1_000)
    silent.write("hi\n" + "x" * 1_001)  # and it goes on
    silent.flush()
    said = lines()
    assert next(said) == "hi"
    with pytest.raises(UsageError, match="standard input has more than"):
        next(said)


def test_other_ranks_do_not_read_what_one_of_them_is_given(silent: io.TextIOWrapper) -> None:
    silent.write("text")
    silent.close()
    assert whole_prompt("explain", alone=False) == "explain"
    with pytest.raises(UsageError, match="no prompt"):
        whole_prompt(None, alone=False)


def test_a_terminal_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, ours = pty.openpty()
    with os.fdopen(ours) as terminal:
        monkeypatch.setattr("sys.stdin", terminal)
        assert whole_prompt("explain") == "explain"
        with pytest.raises(UsageError, match="no prompt"):
            whole_prompt(None)
    os.close(theirs)


def test_generate_answers_what_is_piped_and_refuses_nothing(
    quick_models: Callable[[int], Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["generate", str(quick_models(2)), "-m", "1", "--quiet", "--json", "--ignore-chat-template"]
    found = []
    for given, text in ((["-p", "def f"], None), ([], "def f"), (["-p", "def"], "f"), ([], None)):
        monkeypatch.setattr("sys.stdin", io.StringIO(text or ""))
        assert main([*words, *given]) == (2 if not given and text is None else 0)
        found.append(json.loads(capsys.readouterr().out))
    assert found[0]["tokens"] == found[1]["tokens"] and found[2]["prompt_tokens"] > 0
    assert found[3]["error"] == "no prompt: give --prompt TEXT, or pipe text in; outcore chat asks for it"


@pytest.mark.parametrize("more", [["generate"], ["cache-prompt", "--prompt-cache-file", "x.safetensors"]])
def test_a_text_far_beyond_the_models_context_is_refused_before_it_is_tokenized(
    quick_models: Callable[[int], Path], more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Tokenizing takes two hundred times the text's memory."""
    words = [*more, str(quick_models(2)), "-p", "x" * (16 * 4096 + 1)]
    assert main(words) == 1
    assert "this model's context is 4096 tokens: shorten it" in capsys.readouterr().err
