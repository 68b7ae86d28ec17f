"""Code in README.md, CONTRIBUTING.md and docs works as it stands there: it runs on a tiny model, in this process.

Indented blocks are shell, fenced ones what they say. ``docs/commands.md`` is what ``--help`` prints.
"""

from __future__ import annotations

import functools
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from adapters import save_adapter
from outcore.cli.commands import commands, parser_of
from outcore.cli.main import main
from outcore.serve.server import Server
from outcore_compat import mlx_lm as patched

ROOT = Path(__file__).parents[1]
DOCS = [page for page in sorted((ROOT / "docs").glob("*.md")) if page.name != "commands.md"]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "tests" / "README.md", *DOCS]
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))

# What a page names, and what the folder of its test has instead.
NAMED = {
    "mlx-community/Qwen3.5-9B-MLX-6bit": "MODEL",
    "mlx-community/Qwen3-32B-4bit": "MODEL",
    "/Volumes/second": "second",
    "cache rm NAME": "cache rm sessions-work",
    "DRAFTER --draft-bits 4": "ngram",
}

# Flags for commands that would take long, wait for a user, or need a free port.
ADDED = {
    "generate": "--max-tokens 2", "chat": "--max-tokens 2", "mlx_lm.chat": "--max-tokens 2",
    "plan": "--no-calibrate", "serve": "--port 0", "clear": "--force",
}  # fmt: skip

# Commands that are not run, by how they begin, and why. Outcore's are parsed; flags and files of others are there.
NOT_RUN = {
    "outcore generate --model MODEL --image": "needs a model that reads images; test_vision_pictures.py",
    "outcore draft train": "takes minutes; test_draft_train.py",
    "outcore launch ": "needs a second machine",
    "outcore embed ": "needs an embedding model; test_embeddings.py runs it",
    "outcore bench ": "measures for minutes, in other processes",
    "outcore matrix ": "measures for minutes, in other processes",
    "outcore calibrate ": "takes seconds; test_calibrate.py runs it",
    "outcore doctor": "takes seconds; test_doctor.py runs it",
    "outcore monitor": "needs a process that runs; test_monitor_command.py runs it",
    "python benchmarks/": "measures for minutes",
    "pip install ": "installs",
    ". .venv/bin/activate": "is for the reader's shell",
    "scripts/": "CI runs them",
    ".venv/bin/python -m pytest ": "runs tests",
}

# Flags in the text that are other programs'.
THEIRS = {"--add-host", "--build-arg", "--from", "--map-tokens", "--tools", "--backend", "--batch", "--its-own-flags"}


def parts(page: Path, kind: str) -> list[tuple[str, str]]:
    """Language and text of ``code_block``, ``fence`` or ``code_inline``."""
    parsed = MarkdownIt().enable("table").parse(page.read_text(encoding="utf-8"))
    return [(t.info, t.content) for token in parsed for t in (token, *(token.children or ())) if t.type == kind]


def shell(page: Path) -> Iterator[str]:
    """Commands with their continuation lines and here-documents, without comments."""
    for _, block in parts(page, "code_block"):
        for found in re.findall(r".*<<'END'\n(?:.*\n)*?END\n|(?:.*\\\n)*.*\n", block):
            if command := re.sub(r"(^|  )# .*", "", found).replace("\\\n", " ").strip():
                yield command


def standing_in(code: str) -> str:
    for name, ours in NAMED.items():
        code = code.replace(name, ours)
    return re.sub(r"(max_tokens\W+)\d+", r"\g<1>2", code)


@pytest.fixture
def folder(quick_models: Callable[[int], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder that has what pages name; servers end once they are ready."""
    model = shutil.copytree(quick_models(2), tmp_path / "MODEL")
    (model / "chat_template.jinja").write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    save_adapter(model, tmp_path / "adapters", layers=1)
    (tmp_path / "second").mkdir()
    (tmp_path / "Modelfile").write_text("FROM ./MODEL\nPARAMETER temperature 0.5\n")
    (tmp_path / "my_script.py").write_text("import mlx_lm\n\nassert mlx_lm.load('MODEL')[0].outcore.plan\n")
    for name in ("bench.json", "matrix.json"):
        shutil.copy(ROOT / "benchmarks" / "results" / "qwen3.5-9b-8bit-direct-h200.json", tmp_path / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Server, "run", lambda self, sockets: None)


def run(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    command = standing_in(command)
    words = shlex.split(command.partition("<<")[0], comments=True)
    words += [flag for word, flags in ADDED.items() if word in words for flag in flags.split()]
    monkeypatch.setattr(sys, "stdin", StringIO("hello\nq\n"))
    if command.startswith(tuple(NOT_RUN)):
        if words[0] == "outcore":
            launched = getattr(parser_of(words[1]).parse_args(words[2:]), "words", ())
            assert not launched or parser_of(launched[1]).parse_args(launched[2:])
    elif words[0] == "outcore":
        assert main(words[1:]) == 0, command
    elif words[:3] == ["python", "-m", "outcore.integrations.mlx_lm"]:
        patched.main(words[3:])
    elif words[0] == "export":
        monkeypatch.setenv(*words[1].split("="))
    else:
        assert words[0] in ("cat", "cp"), command
        subprocess.run(["bash", "-ec", command], check=True)


@each_page
def test_commands_run(page: Path, folder: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for command in shell(page):
        run(command, monkeypatch)


@each_page
def test_python_runs(page: Path, folder: None) -> None:
    names: dict[str, object] = {}
    for language, code in parts(page, "fence"):
        if language == "python":
            exec(standing_in(code), names)


def test_python_asks_what_the_command_asks(short_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = next(code for language, code in parts(ROOT / "README.md", "fence") if language == "python")
    name, question = re.search(r'load\("(.*?)"', code), re.search(r'"content": "(.*?)"', code)
    assert name and question
    assert code.removesuffix("model.outcore.close()\n") in (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    exec(code.replace(name[1], str(short_model)).replace("max_tokens=200", "max_tokens=4"), {})
    answer = capsys.readouterr().out
    asked = ["--prompt", question[1], "--max-tokens", "4", "--quiet", "--draft", "none"]
    assert main(["generate", str(short_model), *asked]) == 0
    assert answer and capsys.readouterr().out == f"{answer}\n"


def files(word: str) -> list[Path]:
    folders = ROOT, ROOT / "src", ROOT / "src" / "outcore", ROOT / "tests"
    return [file for folder in folders for file in folder.glob(word)]


@functools.cache
def flags_of(command: str) -> set[str]:
    return set(parser_of(command)._option_string_actions)


def unknown(text: str) -> list[str]:
    """Flags and files in a command, or in a part of one, that do not exist."""
    words = text.partition(" -- ")[0].replace("=", " ").removeprefix("outcore ").split()
    scripts = "".join(
        file.read_text(encoding="utf-8") for word in words if word.endswith(".py") for file in files(word)
    )
    if words and words[0] in commands():
        flags = flags_of(words[0])
    else:
        flags = set(re.findall(r"--[a-z-]+", scripts)) or THEIRS.union(*map(flags_of, commands()))
    paths = [word for word in words if re.fullmatch(r"[\w*-]+/[\w*/.-]+\.(py|md|toml|yml|txt)", word)]
    wrong = [word for word in words if re.match(r"--[a-z]", word) and word not in flags]
    return wrong + [path for path in paths if not files(path)]


@each_page
def test_flags_and_files_exist_and_code_is_no_wider_than_a_forge_shows(page: Path) -> None:
    assert [w for text in [t for _, t in parts(page, "code_inline")] + [*shell(page)] for w in unknown(text)] == []
    lines = [line for kind in ("code_block", "fence") for _, block in parts(page, kind) for line in block.splitlines()]
    assert [line for line in lines if len(line) > 100 and line[0] != "{"] == []


def test_a_misspelt_flag_or_file_is_found(folder: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert unknown("outcore plan MODEL --memroy 4GB") == unknown("--memroy") == ["--memroy"]
    assert unknown("python benchmarks/batch.py --raet 1MB") == ["--raet"]
    assert unknown("decode/loop.py") == ["decode/loop.py"]
    for command in ("outcore generate MODEL --memroy 4GB", "outcore launch --hosts local -- plan MODEL --memroy 4GB"):
        with pytest.raises((AssertionError, ValueError), match="memroy"):
            run(command, monkeypatch)


def test_each_exception_is_needed() -> None:
    found = [command for page in PAGES for command in shell(page)]
    assert [begins for begins in NOT_RUN if not any(command.startswith(begins) for command in found)] == []
