"""Hosts that have the model at different places, or ranks' own folders of it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from outcore.cli.commands import parser_of
from outcore.cli.main import main
from outcore.errors import UsageError
from outcore_cluster.launch.as_rank import RANK, RANK_MODEL, find_own_model
from outcore_cluster.launch.hosts import Host, find_hosts

ASK = ["--memory", "60MB", "-p", "def read_lines(path):", "--ignore-chat-template", "--seed", "1", "--draft", "none"]
HOSTS = ["--hosts", "local,localhost"]
"""Two names of this machine."""


def outcore(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "outcore", *words], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120
    )


def tokens(done: subprocess.CompletedProcess[str]) -> list[int]:
    assert done.returncode == 0, done.stderr
    found: list[int] = json.loads(done.stdout)["tokens"]
    return found


def generated(*launch: str, model: Path | str) -> subprocess.CompletedProcess[str]:
    return outcore("launch", *launch, "--", "generate", "--model", str(model), *ASK, "-m", "8", "--json")


@pytest.fixture(scope="module")
def model(served: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("here") / "model"
    shutil.copytree(served, folder)
    return folder


@pytest.fixture(scope="module")
def expected(model: Path) -> list[int]:
    found = tokens(outcore("generate", "--model", str(model), *ASK, "-m", "8", "--json"))
    assert len(found) == 8
    return found


def test_each_host_may_have_the_model_at_a_place_of_its_own(model: Path, expected: list[int], tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "there", copy_function=shutil.copyfile)
    own = ["--model-of", f"local={model}", "--model-of", f"localhost={tmp_path / 'there'}"]
    assert tokens(generated(*HOSTS, *own, model="/nowhere")) == expected
    missing = generated(*HOSTS, "--model-of", f"localhost={tmp_path / 'none'}", model=model)
    assert missing.returncode == 1
    assert f"rank 1 (localhost): '{tmp_path / 'none'}': no such folder" in missing.stderr


@pytest.mark.parametrize(
    ("command", "words"),
    [("generate", ["--model", "m"]), ("plan", ["m"]), ("serve", ["m"]), ("serve", ["--model", "m"])],
)
def test_a_rank_takes_its_own_place_however_the_model_was_named(command: str, words: list[str]) -> None:
    def named(environment: dict[str, str]) -> list[Any]:
        args = parser_of(command).parse_args(words)
        find_own_model(args, environment)
        assert RANK_MODEL not in environment
        return [
            *getattr(args, "models_named", []),
            *([args.model] if isinstance(args.model, str) else args.model or []),
        ]

    assert named({RANK: "1", RANK_MODEL: "/own"}) == ["/own"]
    assert named({RANK_MODEL: "/own"}) == ["m"], "what a rank starts is none itself"


def test_a_hostfile_says_where_models_are(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text(json.dumps([{"ssh": "a", "ips": ["10.0.0.1"], "model": "/m"}, {"ssh": "b", "ips": ["10.0.0.2"]}]))
    assert find_hosts(None, str(path), 1).hosts == [Host("a", "10.0.0.1", "/m"), Host("b", "10.0.0.2")]
    found = find_hosts(None, str(path), 2, {"a": "/other", "b": "~/b"}).hosts
    assert [host.model for host in found] == ["/other", "/other", "~/b", "~/b"]
    path.write_text(json.dumps([{"ssh": "a", "ips": ["10.0.0.1"], "model": ["/m"]}]))
    with pytest.raises(UsageError, match="not a list such as"):
        find_hosts(None, str(path), 1)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["mini=/m"], "--model-of mini: no such host; there are local, localhost"),
        (["/m"], "HOST=PATH"),
        (["local=/m", "local=/n"], "--model-of local: twice, and not the same"),
    ],
)
def test_a_place_of_no_host_is_refused(given: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    places = [word for each in given for word in ("--model-of", each)]
    assert main(["launch", *HOSTS, *places, "--", "generate", "m"]) == 2
    assert says in capsys.readouterr().err
