"""Packing that is killed at any moment, and several first runs at once: the next run finds nothing in its way."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from outcore.checkpoint import pack
from outcore.checkpoint import packed_store as store
from outcore.checkpoint.identity import identity_of
from outcore.checkpoint.manifest import DRAFT, is_packed
from outcore.checkpoint.pack import pack_files, pack_overlay
from outcore.checkpoint.packed_bytes import packed_file
from outcore.checkpoint.packed_store import missing_bytes, open_model, open_packed, places
from outcore.errors import StoreError
from outcore.modules.layers import find_layers
from outcore_packs.full_copy import pack_model
from quick_transformers import python_path
from test_pack import assert_holds, original, reference, refusal

EVENTS = ("open", "os.rename", "os.remove", "os.mkdir")
RUN = """
import os, sys
from pathlib import Path
from outcore_packs.full_copy import pack_model
left = int(sys.argv[3])
def hook(event, arguments):
    global left
    changes = event != "open" or isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
    if event in {events} and sys.argv[2] in str(arguments[0]) and changes:
        left -= 1
        if left < 0:
            os._exit(9)
sys.addaudithook(hook)
pack_model(Path(sys.argv[1]), Path(sys.argv[2]), force=sys.argv[4] == "force")
print(left)
"""


def run(folder: Path, out: Path, kill_at: int, force: bool = False) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": python_path(Path(pack.__file__).parents[2])}
    code = RUN.replace("{events}", str(EVENTS))
    command = [sys.executable, "-c", code, str(folder), str(out), str(kill_at), "force" if force else ""]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return original(tmp_path_factory.mktemp("models") / "m", num_hidden_layers=2)


class Killed(BaseException):
    """Stands for a kill: nothing that would clean up runs after it."""


def killed_at(monkeypatch: pytest.MonkeyPatch, event: int, pack_: Any) -> bool:
    """Run ``pack_`` with the process as good as dead from that event of the file system on; whether it got so far."""
    left = event

    def dies(real: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed
            return real(*arguments, **named)

        return call

    with monkeypatch.context() as patch:
        for name in ("mkdir", "rename", "unlink"):
            patch.setattr(Path, name, dies(getattr(Path, name)))
        for name in ("fsync", "write"):
            patch.setattr(os, name, dies(getattr(os, name)))
        try:
            pack_()
        except Killed:
            return True
    return False


@pytest.mark.parametrize("force", [False, True])
def test_killed_at_any_file_system_event_it_goes_on(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, force: bool
) -> None:
    """Each 17th one, others where what is there is replaced; ``benchmarks/kills.py`` takes random ones."""
    whole = pack_model(model, tmp_path / "whole")
    expected = {file.name: file.read_bytes() for file in whole.files}
    for event in range(8 * force, 1000, 17):
        out = tmp_path / "out"
        shutil.rmtree(out, ignore_errors=True)
        if force:
            shutil.copytree(whole.folder, out)
        if not killed_at(monkeypatch, event, lambda out=out: pack_model(model, out, force=force)):
            break
        again = pack_model(model, out)
        assert {file.name: file.read_bytes() for file in again.files} == expected, event
        assert {p.name for p in out.iterdir()} == {p.name for p in whole.folder.iterdir()}, event
    assert event > 20


def test_five_first_runs_at_once_all_succeed(tmp_path: Path, model: Path) -> None:
    errors: list[BaseException] = []
    barrier = threading.Barrier(5)
    outs = [tmp_path / f"out{n}" for n in range(2)]

    def first_runs() -> None:
        try:
            for out in outs:
                barrier.wait()
                pack_model(model, out)
        except BaseException as e:
            errors.append(e)
            barrier.abort()

    threads = [threading.Thread(target=first_runs) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for out in outs:
        assert open_packed(out).tensors.keys() and not list(out.glob("*.partial*"))


def test_what_another_process_has_begun_is_waited_for_not_refused(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is looked at under its lock: before, it was refused when its manifest appeared between two looks."""
    out = tmp_path / "out"
    claim = pack.PackWriter._claim
    looks: list[set[str]] = []

    def look(self: pack.PackWriter) -> None:
        looks.append({p.name for p in out.iterdir()} if out.is_dir() else set())
        claim(self)

    monkeypatch.setattr(pack.PackWriter, "_claim", look)
    pack_model(model, out)
    assert looks == [{".lock"}]
    pack_model(model, out, force=True)
    assert ".lock" in looks[-1]


def test_a_folder_in_the_cache_is_ours_whatever_its_manifest_has_become(tmp_path: Path, model: Path) -> None:
    lazy = open_model(model)
    layers = find_layers(lazy.model)
    pack_overlay(lazy, layers)
    folder = store.overlay(lazy)[0]
    (folder / "manifest.json").write_text("\0" * 100)
    assert missing_bytes(lazy, layers) > 0
    pack_overlay(lazy, layers)
    assert_holds(places(lazy, layers), reference(model))


def test_a_draft_of_another_model_in_its_folder_is_made_anew(tmp_path: Path, model: Path) -> None:
    lazy = open_model(model)
    layer = find_layers(lazy.model)[0]
    pieces = {f"{layer.path}.{p.path}": p.array for p in layer.parameters}
    files = [packed_file("layer_0000.safetensors", layer.path, pieces)]
    folder = tmp_path / "copy" / "draft-3bit"
    pack_files(DRAFT, folder, lazy.checkpoint, files, files, lambda: dict(pieces))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["source"]["identity"] = "0" * 32
    (folder / "manifest.json").write_text(json.dumps(manifest))
    pack_files(DRAFT, folder, lazy.checkpoint, files, files, lambda: dict(pieces))
    found = open_packed(folder)
    assert found.manifest.kind == DRAFT and found.manifest.source.identity == identity_of(lazy.checkpoint)


def test_a_draft_is_not_written_to_where_a_foreign_copy_links(tmp_path: Path, model: Path) -> None:
    lazy = open_model(model)
    layer = find_layers(lazy.model)[0]
    pieces = {f"{layer.path}.{p.path}": p.array for p in layer.parameters}
    files = [packed_file("layer_0000.safetensors", layer.path, pieces)]
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "layer_0007.safetensors").write_text("mine")
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "draft-3bit").symlink_to(victim)
    folder = tmp_path / "copy" / "draft-3bit"
    assert "a link" in refusal(
        StoreError, pack_files, DRAFT, folder, lazy.checkpoint, files, files, lambda: dict(pieces)
    )
    assert [p.name for p in victim.iterdir()] == ["layer_0007.safetensors"]


def test_a_lock_that_is_a_link_or_a_pipe_is_not_followed(tmp_path: Path, model: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / ".lock").symlink_to(tmp_path / "elsewhere")
    assert "cannot be written" in refusal(StoreError, pack_model, model, out)
    assert not (tmp_path / "elsewhere").exists() and not is_packed(out)
