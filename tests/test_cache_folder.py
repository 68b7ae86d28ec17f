"""Whose folder the cache is, and what is read back from it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from platformdirs.macos import MacOS
from platformdirs.unix import Unix

import zoo
from outcore.calibration.calibration_file import load_calibration, store_calibration
from outcore.checkpoint import manifest
from outcore.checkpoint.manifest import read_manifest
from outcore.checkpoint.packed_store import open_model
from outcore.cli.main import main
from outcore.errors import CalibrationError, StoreError
from outcore.machine import cache_folder
from outcore.machine.cache_folder import cache_dir, make_cache
from outcore.plan.machine_profile import Calibration
from outcore_packs.full_copy import pack_model
from test_pack import original, refusal


def test_the_cache_is_where_the_system_keeps_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_dir() == tmp_path / "outcore-cache"
    monkeypatch.setenv("OUTCORE_CACHE", "")
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    monkeypatch.setattr(cache_folder, "PlatformDirs", Unix)
    assert cache_dir() == Path("/x/outcore")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_dir() == Path("/home/me/.cache/outcore")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(cache_folder, "PlatformDirs", MacOS)
    assert cache_dir() == Path("/home/me/Library/Caches/outcore")


def test_the_folder_is_made_for_this_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = os.umask(0)
    try:
        monkeypatch.setenv("OUTCORE_CACHE", str(tmp_path / "deep" / "cache"))
        copy = pack_model(original(tmp_path / "m", num_hidden_layers=2), None).folder
    finally:
        os.umask(old)
    assert copy.parent == tmp_path / "deep" / "cache"
    assert [p.stat().st_mode & 0o777 for p in (copy, copy.parent)] == [0o700, 0o700]


def test_a_cache_folder_that_cannot_be_made_is_named_with_what_named_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And nobody waits for it: ``pack`` asked for it without end."""
    folder = original(tmp_path / "m", num_hidden_layers=2)
    monkeypatch.setenv("OUTCORE_CACHE", "/proc/nope" if Path("/proc").is_dir() else "/dev/null/nope")
    with pytest.raises(OSError, match="by OUTCORE_CACHE"):
        make_cache()
    with pytest.raises(CalibrationError) as e:
        store_calibration(folder, 1, Calibration())
    assert main(["pack", str(folder)]) == 1
    for line in (str(e.value), capsys.readouterr().err):
        assert "nope" in line and line.count("set OUTCORE_CACHE") == 1


def test_a_folder_that_everyone_may_write_to_is_refused_by_every_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    monkeypatch.setenv("OUTCORE_CACHE", str(shared))
    model = zoo.save_checkpoint("llama", tmp_path / "m")
    for command in (["info", str(model)], ["pack", str(model)], ["plan", str(model), "--memory", "1GB"]):
        assert main(command) == 1
        said = capsys.readouterr().err.strip()
        assert "everyone may write to it" in said and "OUTCORE_CACHE" in said and "\n" not in said
    assert not list(shared.iterdir())
    monkeypatch.setenv("OUTCORE_CACHE", str(shared / "own"))
    assert main(["pack", str(model)]) == 0


def test_a_folder_that_its_group_may_write_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    monkeypatch.setenv("OUTCORE_CACHE", str(shared))
    for mode in (0o770, 0o775, 0o2770):
        shared.chmod(mode)
        for use in (cache_dir, make_cache):
            assert "its group may write to it; chmod g-w" in refusal(StoreError, use)
    shared.chmod(0o750)
    assert make_cache() == shared


def test_a_folder_of_another_user_is_refused_but_to_the_superuser(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTCORE_CACHE", str(tmp_path))
    me = os.geteuid()
    monkeypatch.setattr(cache_folder.os, "geteuid", lambda: me + 1)
    assert f"belongs to user {me}" in refusal(StoreError, cache_dir)
    monkeypatch.setattr(cache_folder.os, "geteuid", lambda: 0)
    assert cache_dir() == tmp_path


def test_a_copy_that_another_user_put_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = original(tmp_path / "m", num_hidden_layers=2)
    copy = pack_model(folder, None).folder
    copy.chmod(0o777)
    assert "everyone may write to it" in refusal(StoreError, open_model, folder)


def test_links_are_followed_if_they_are_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link, there = tmp_path / "link", tmp_path / "there"
    link.symlink_to(there)
    monkeypatch.setenv("OUTCORE_CACHE", str(link))
    assert "links to nothing" in refusal(StoreError, make_cache)
    there.mkdir()
    assert make_cache() == link
    me = os.geteuid()
    monkeypatch.setattr(cache_folder.os, "geteuid", lambda: me + 1)
    assert ("a link that user" if me else "belongs to user") in refusal(StoreError, cache_dir)


def test_what_is_no_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("OUTCORE_CACHE", str(tmp_path / "file"))
    assert "not a folder" in refusal(StoreError, cache_dir)
    monkeypatch.setenv("OUTCORE_CACHE", str(tmp_path / "file" / "below"))
    assert "cannot be opened" in refusal(StoreError, cache_dir)
    monkeypatch.setenv("OUTCORE_CACHE", "~nobody-here/x")
    assert "OUTCORE_CACHE" in refusal(StoreError, cache_dir)


# Manifests

OUTSIDE = [
    "../../../../x" + "0" * 19,
    "/" + "0" * 31,
    "0" * 31 + "/",
    "0" * 31,
    "0" * 33,
    "A" * 32,
    "0" * 32 + "\n",
    "",
    5,
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed")
    return pack_model(original(folder / "m", num_hidden_layers=2), folder / "out").folder


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    """A packed copy that may be spoiled."""
    return shutil.copytree(whole, tmp_path / "out")


@pytest.mark.parametrize("identity", OUTSIDE)
def test_an_identity_that_is_no_digest_never_becomes_a_path(copy: Path, tmp_path: Path, identity: Any) -> None:
    path = copy / "manifest.json"
    found = json.loads(path.read_text())
    found["source"]["identity"] = identity
    path.write_text(json.dumps(found))
    before = sorted(tmp_path.rglob("*"))
    assert "garbled: source.identity" in refusal(StoreError, open_model, copy)
    assert sorted(tmp_path.rglob("*")) == before


GARBLED = [
    lambda m: m["files"]["layer_0000.safetensors"].update(bytes=-1),
    lambda m: m["files"]["layer_0000.safetensors"].update(bytes=2**63),
    lambda m: m["files"]["layer_0000.safetensors"].update(bytes=1.0),
    lambda m: m["files"]["layer_0000.safetensors"].update(mtime_ns="1"),
    lambda m: m["files"]["layer_0000.safetensors"].update(xxh3_128="../" * 10 + "ab"),
    lambda m: m["source"].update(folder="x" * 5000),
    lambda m: m["source"].update(mlx=[]),
    lambda m: m.update(schema=True),
    lambda m: m.update(schema=1.0),
    lambda m: m.update(kind=["full"]),
]


@pytest.mark.parametrize("n", range(len(GARBLED)))
def test_every_value_of_a_manifest_is_checked(copy: Path, n: int) -> None:
    open_model(copy)
    path = copy / "manifest.json"
    found = json.loads(path.read_text())
    GARBLED[n](found)
    path.write_text(json.dumps(found))
    refusal(StoreError, open_model, copy)


def test_what_a_later_version_adds_to_a_manifest_is_left_alone(copy: Path) -> None:
    path = copy / "manifest.json"
    found = json.loads(path.read_text())
    found["source"]["revision"] = found["more"] = "x"
    path.write_text(json.dumps(found))
    assert read_manifest(path).kind == manifest.FULL


# Calibrations

HOSTILE: list[Any] = [None, True, 0, -1, 1e400, float("nan"), "1", "../..", [], {}, 10**400]


def test_every_value_of_a_calibration_is_checked(tmp_path: Path) -> None:
    whole = Calibration(
        kinds={"Layer 0": {1: 0.1, 4: 0.2}}, measured=True, threads=4,
        chunk=1 << 20,
    )  # fmt: skip
    path = store_calibration(tmp_path, 1, whole)
    assert load_calibration(tmp_path, 1) == whole
    document = json.loads(path.read_text())
    places = [(name,) for name in document["calibration"]]
    places += [("kinds", "Layer 0"), ("kinds", "Layer 0", "1")]
    refused = 0
    for place in places:
        for value in HOSTILE:
            changed = json.loads(json.dumps(document))
            at = changed["calibration"]
            for key in place[:-1]:
                at = at[key]
            at[place[-1]] = value
            text = json.dumps(changed)
            path.write_text(text.replace("Infinity", "1e400"))
            found = load_calibration(tmp_path, 1)
            refused += found is None
            if found is not None:  # what is taken is a calibration that can be computed with
                numbers = [v for v in vars(found).values() if isinstance(v, int | float) and not isinstance(v, bool)]
                numbers += [s for times in found.kinds.values() for s in times.values()]
                assert all(0 < v < float("inf") for v in numbers), (place, value)
                store_calibration(tmp_path, 1, found)
    assert refused > 100


@pytest.mark.parametrize("text", ["", "[" * 100_000, '{"a":' + "9" * 5000 + "}", "[]", "\xff", '{"key": []}'])
def test_a_calibration_that_is_no_json_is_passed_over(tmp_path: Path, text: str) -> None:
    path = store_calibration(tmp_path, 1, Calibration())
    path.write_text(text, encoding="latin-1")
    assert load_calibration(tmp_path, 1) is None
    path.rename(path.with_name("other.json"))
    assert load_calibration(tmp_path, 1) is None


def test_what_a_killed_process_had_begun_to_write_is_removed(tmp_path: Path) -> None:
    path = store_calibration(tmp_path, 1, Calibration())
    dead = subprocess.Popen(["true"])
    dead.wait()
    for number in (dead.pid, os.getpid()):
        path.with_name(f"{path.name}.{number}.tmp").touch()
    path.with_name(f"{path.name}.{os.getppid()}.tmp").touch()
    store_calibration(tmp_path, 1, Calibration())
    assert {p.name for p in path.parent.iterdir()} == {path.name, f"{path.name}.{os.getppid()}.tmp"}


def test_a_pipe_in_the_place_of_a_calibration_is_not_waited_for(tmp_path: Path) -> None:
    path = store_calibration(tmp_path, 1, Calibration())
    path.unlink()
    os.mkfifo(path)
    os.mkfifo(path.with_name("other.json"))
    assert load_calibration(tmp_path, 1) is None


def test_a_cache_that_others_can_write_to_has_no_calibration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = store_calibration(tmp_path, 1, Calibration())
    assert path.parent.parent == cache_dir()
    cache_dir().chmod(0o777)
    assert load_calibration(tmp_path, 1) is None
