"""``outcore list``: what is in the Hub's cache and what it would need; what is broken is told, and breaks nothing."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

import zoo
from outcore.cli.main import main
from outcore.decode.preparation import prepare
from outcore.plan.planner import resident_budget


def fetched(cache: Path, name: str, source: Path, ref: str = "main", commit: str = "a" * 40) -> Path:
    """A model in a cache of the Hub's form."""
    repo = cache / f"models--{name.replace('/', '--')}"
    folder = repo / "snapshots" / commit
    for place in (folder, repo / "refs", repo / "blobs"):
        place.mkdir(parents=True, exist_ok=True)
    (repo / "refs" / ref).write_text(commit)
    for file in source.iterdir():
        shutil.copy(file, repo / "blobs" / f"{commit[0]}-{file.name}")
        (folder / file.name).symlink_to(f"../../blobs/{commit[0]}-{file.name}")
    return folder


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    base = tmp_path_factory.mktemp("list")
    return zoo.save_checkpoint("llama", base / "llama"), zoo.save_checkpoint("qwen3_5", base / "qwen")


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))


def listed(capsys: Any, *args: str) -> dict[str, dict[str, Any]]:
    capsys.readouterr()
    assert main(["list", "--json", *args]) == 0
    return {m["model"]: m for m in json.loads(capsys.readouterr().out)["models"]}


def test_each_model_is_reported_with_what_it_would_need(
    sources: tuple[Path, Path], tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("the network was asked"))
    for name, source in zip(("own/llama", "other/qwen"), sources, strict=True):
        fetched(tmp_path, name, source)
    (tmp_path / "datasets--own--d" / "snapshots").mkdir(parents=True)
    found = listed(capsys, "--context", "64")
    assert list(found) == ["other/qwen", "own/llama"]
    for name, source in zip(("own/llama", "other/qwen"), sources, strict=True):
        known = prepare(source, memory="1GB", context=64)
        row = found[name]
        assert row["smallest_budget_bytes"] == known.plan.smallest_budget_bytes
        assert row["resident_budget_bytes"] == resident_budget(known.profile.size) and row["reason"] is None
        assert row["disk_bytes"] == sum(f.stat().st_size for f in source.iterdir())
    row = found["own/llama"]
    for budget, here in (
        (row["resident_budget_bytes"], "all resident"),
        (row["resident_budget_bytes"] - 1, "streams"),
        (row["smallest_budget_bytes"], "streams"),
        (row["smallest_budget_bytes"] - 1, "does not fit"),
    ):
        again = listed(capsys, "--context", "64", "--memory", f"{budget}B")
        assert again["own/llama"]["here"] == here
    assert main(["list", "--context", "64"]) == 0
    assert "all resident" in capsys.readouterr().out


def test_the_main_branch_is_what_a_name_stands_for(sources: tuple[Path, Path], tmp_path: Path, capsys: Any) -> None:
    folder = fetched(tmp_path, "own/m", sources[0])
    fetched(tmp_path, "own/m", sources[1], "old", "b" * 40)
    assert listed(capsys)["own/m"]["folder"] == str(folder)


def test_what_cannot_be_opened_is_reported_with_a_reason_and_the_others_are_reported(
    sources: tuple[Path, Path], tmp_path: Path, capsys: Any
) -> None:
    good = sources[0]
    config = json.loads((good / "config.json").read_text())
    fetched(tmp_path, "own/good", good)
    changed: dict[str, tuple[Any, str]] = {
        "unknown": (config | {"model_type": "nothing_known"}, "nothing_known"),
        "strange": (config | {"hidden_size": "x"}, "mlx-lm could not make"),
        "list": ([], "no JSON object"),
    }
    for name, (text, _) in changed.items():
        folder = fetched(tmp_path, f"own/{name}", good)
        (folder / "config.json").unlink()
        (folder / "config.json").write_text(json.dumps(text))
    for file in fetched(tmp_path, "own/bare", good).glob("*.safetensors"):
        file.unlink()
    (tmp_path / "models--own--empty").mkdir()
    found = listed(capsys)
    assert found.pop("own/good")["here"] is not None
    reasons = {name.removeprefix("own/"): m["reason"] for name, m in found.items()}
    assert reasons.keys() == {*changed, "bare", "empty"}
    assert all(changed[name][1] in reasons[name] for name in changed)
    assert "half-downloaded" in reasons["bare"] and "incomplete" in reasons["empty"]
    assert all(len(why) <= 90 and str(tmp_path) not in why for why in reasons.values())


def test_where_there_is_no_cache_there_are_no_models(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "no"))
    assert listed(capsys) == {}
    assert main(["list"]) == 0
    assert "no models" in capsys.readouterr().out


def test_a_name_cannot_move_the_terminals_cursor(sources: tuple[Path, Path], tmp_path: Path, capsys: Any) -> None:
    fetched(tmp_path, "own/\x1b[2J\x9bm", sources[0])
    assert main(["list", "--context", "64"]) == 0
    shown = capsys.readouterr().out
    assert "own/\\x1b[2J\\x9bm " in shown and "\x1b" not in shown and "\x9b" not in shown
