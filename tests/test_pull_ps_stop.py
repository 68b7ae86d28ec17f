"""``outcore pull``, ``ps`` and ``stop``, and short names for models."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import scan_cache_dir

import outcore
from outcore.cli.main import main
from outcore.monitoring import publisher
from outcore_tools import processes, pull
from test_list import fetched, listed
from watching import made_up, own_folder

GB = 10**9


@pytest.fixture(scope="module")
def quick(quick_models: Callable[[int], Path]) -> Path:
    return quick_models(2)


@pytest.fixture
def folder() -> Iterator[Path]:
    with own_folder() as made:
        made.mkdir(mode=0o700)
        yield made


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    return main(args), *capsys.readouterr()


@pytest.mark.parametrize("room", [True, False])
def test_a_model_is_downloaded_once_and_only_where_there_is_room(
    room: bool, quick: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def dry(repo: str, **options: Any) -> list[SimpleNamespace]:
        assert options["dry_run"] and (repo, options["revision"]) == ("own/quick", "v1")
        sizes = {3 * GB: not asked, 7: False}
        return [SimpleNamespace(file_size=size, will_download=missing) for size, missing in sizes.items()]

    def download(repo: str, revision: str | None) -> Path:
        asked.append(repo)
        return quick

    monkeypatch.setattr(pull, "snapshot_download", dry)
    monkeypatch.setattr(pull, "download", download)
    monkeypatch.setattr(pull.constants, "HF_HUB_CACHE", str(tmp_path / "none" / "yet"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=(5 if room else 4) * GB))
    words = "pull", "own/quick", "--revision", "v1"
    if not room:
        status, out, err = run(capsys, *words)
        assert (status, out, asked) == (1, "", []) and "3.00 GB to download, and 4.00 GB free" in err
        return
    status, out, err = run(capsys, *words)
    assert status == 0 and out.endswith(", downloaded\n") and err.startswith("downloading 3.00 GB")
    status, out, err = run(capsys, *words)
    assert status == 0 and out.startswith(f"{quick}: ") and out.endswith(", already there\n") and err == ""


def test_a_folder_is_there_already_if_it_is_whole(
    quick: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, _ = run(capsys, "pull", str(quick), "--json")
    assert status == 0 and json.loads(out)["downloaded_bytes"] == 0
    half = shutil.copytree(quick, tmp_path / "half")
    os.truncate(half / "model.safetensors", 1_000_000)
    assert "half-downloaded" in run(capsys, "pull", str(half))[2]


def test_what_runs_is_one_line_each(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "ps")
    assert status == 0 and out.startswith("no Outcore process of yours is running")
    publisher.write(folder / f"{os.getpid()}.json", made_up() | {"pid": os.getpid(), "command": "serve"})
    status, out, _ = run(capsys, "ps")
    head, line = out.splitlines()
    assert line.split()[:2] == [str(os.getpid()), "serve"] and "tiny [b]model[/b]" in line and "3.20 GB" in line
    assert head.split() == ["pid", "command", "model", "memory", "tokens/s", "state"]
    assert json.loads(run(capsys, "ps", "--json")[1])["processes"][0]["command"] == "serve"


def test_stop_ends_what_was_named_and_nothing_else(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "no Outcore process" in run(capsys, "stop", "x")[2]
    waits = "import signal as s, sys; s.signal(s.SIGTERM, lambda *_: sys.exit(0)); print(1, flush=True); s.pause()"
    with subprocess.Popen([sys.executable, "-c", waits], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline()
        try:
            for pid, command in ((child.pid, "serve"), (os.getpid(), "python")):
                publisher.write(folder / f"{pid}.json", made_up() | {"pid": pid, "command": command})
            there = f"running: {child.pid} (serve tiny [b]model[/b])\n"
            assert run(capsys, "stop") == (2, "", f"outcore stop: give a PID or a model; {there}")
            for other in (str(os.getpid()), "other"):  # a notebook's process, and none
                assert run(capsys, "stop", other) == (2, "", f"outcore stop: none by that name; {there}")
            assert child.poll() is None
            monkeypatch.setattr(processes.psutil.Process, "wait", lambda *_: child.wait(10))
            status, out, _ = run(capsys, "stop", "tiny [b]model[/b]")
            assert (status, child.returncode) == (0, 0)
            assert out == f"stopped serve tiny [b]model[/b], process {child.pid}\n"
        finally:
            child.kill()


@pytest.fixture
def settled(quick: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "config.toml"
        path.write_text(text)
        monkeypatch.setenv("OUTCORE_CONFIG", str(path))
        return path

    return write


def test_a_short_name_stands_wherever_a_model_does(
    quick: Path, settled: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    settled(f'model = "q"\n[models]\nq = "{quick}"\nhub = "own/name"\n')
    for words in (["q"], []):
        assert json.loads(run(capsys, "info", *words, "--memory", "1GB", "--json")[1])["model"] == str(quick)
    assert main(["generate", "q", "-p", "x", "-m", "1", "--quiet"]) == 0
    model, _ = outcore.load("q")
    model.outcore.close()
    with pytest.raises(outcore.MissingFileError, match="own/name"):
        outcore.load("hub")
    for wrong in ('models = "q"', "[models]\nq = 3"):
        path = settled(wrong)
        status, _, err = run(capsys, "cache", "ls")
        assert status == 2 and f"{path}: [models]: give lines such as qwen =" in err


def test_list_has_folders_with_short_names(
    quick: Path, settled: Callable[[str], Path], tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched(tmp_path / "hub", "own/quick", quick)
    monkeypatch.setattr("outcore_tools.info.scan_cache_dir", lambda _: scan_cache_dir(tmp_path / "hub"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "one").symlink_to(quick)
    settled(f'[models]\nq = "{quick}"\nall = "{tmp_path}/mine"\nhub = "own/name"\n')
    found = listed(capsys)
    assert set(found) == {"own/quick", "q", f"{tmp_path}/mine/one"}
    assert len({row["smallest_budget_bytes"] for row in found.values()}) == 1
