"""``outcore cache``: what is there is told, what nobody uses goes, and nothing else does."""

from __future__ import annotations

import fcntl
import gc
import io
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import outcore
import zoo
from outcore.calibration.calibration_file import store_calibration
from outcore.calibration.first_use import mark
from outcore.checkpoint.packed_store import open_model
from outcore.cli.main import main
from outcore.machine import written
from outcore.machine.cache_folder import cache_dir, keep, remove_folder
from outcore.plan.machine_profile import Calibration
from outcore.sizes import format_size
from outcore_packs.full_copy import pack_model
from outcore_tools import cache
from test_pack import original


def names_in_cache() -> list[str]:
    """Without the count of written bytes, to which a process adds at any time."""
    return sorted(p.name for p in cache_dir().iterdir() if p.name != written.FILE)


def listed(capsys: Any) -> dict[str, dict[str, Any]]:
    capsys.readouterr()
    assert main(["cache", "ls", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["bytes"] == sum(e["bytes"] for e in found["entries"])
    return {e["kind"]: e for e in found["entries"]}


def test_everything_that_is_kept_is_reported_with_its_model_size_and_age(tmp_path: Path, capsys: Any) -> None:
    copy = pack_model(original(tmp_path / "models--own--m", num_hidden_layers=2), None).folder
    store_calibration(tmp_path, 1, Calibration())
    checked = mark(copy / "config.json", "auto")
    assert checked is not None
    checked.parent.mkdir(mode=0o700)
    checked.touch()
    kernels = cache_dir() / "kernels" / "mlx-0.32.4-sm_90"
    kernels.mkdir(parents=True)
    (kernels / "a.ptx").write_bytes(b"x" * 300)
    os.utime(kernels / "a.ptx", (0, time.time() - 7300))
    found = listed(capsys)
    assert set(found) == {"packed copy", "calibration", "first-use mark", "kernels"}
    packed = found["packed copy"]
    files = sum(p.lstat().st_size for p in copy.iterdir())
    assert (packed["name"], packed["bytes"], packed["state"]) == (copy.name, files, None)
    assert packed["model"] == "models/own/m" or packed["model"] == "own/m"
    assert packed["age_s"] < 100 and 7200 < found["kernels"]["age_s"] < 7500 and found["kernels"]["bytes"] == 300
    assert main(["cache", "ls"]) == 0
    shown = capsys.readouterr().out
    assert all(e["name"] in shown for e in found.values()) and "2 h ago" in shown
    for coding, shown in (("planes:2", True), ("compact", True), ("plain", False), ("\x1b[2J", False)):
        (copy / "manifest.json").write_text(json.dumps({"coding": coding}))
        assert main(["cache", "ls"]) == 0
        assert (f"packed copy, {coding}" in capsys.readouterr().out) == shown
        assert listed(capsys)["packed copy"]["coding"] == (coding if shown else None)
    (copy / "manifest.json").unlink()
    assert listed(capsys)["packed copy"]["state"] == "unfinished"


def test_only_what_was_named_goes_by_a_beginning_that_only_it_has(tmp_path: Path, capsys: Any) -> None:
    for name in ("one", "other"):
        pack_model(original(tmp_path / name, num_hidden_layers=2), None)
    before = names_in_cache()
    for name, says in (("full-o", "2 names begin like this"), ("no", "no such item"), ("", "no such item")):
        assert main(["cache", "rm", name]) == 2
        assert says in capsys.readouterr().err
    assert names_in_cache() == before
    assert main(["cache", "rm", "full-on", "full-one", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["removed"] == [before[0]]
    assert names_in_cache() == before[1:]


def test_what_a_model_reads_from_stays_until_it_is_gone(tmp_path: Path, capsys: Any) -> None:
    folder = zoo.save_checkpoint("rwkv7", tmp_path / "m")
    model = outcore.load_model(folder, memory="1GB", resident=0, context=64, draft="none")[0]
    overlay = listed(capsys)["overlay"]
    assert overlay["state"] == "in use"
    assert main(["cache", "clear", "--yes", "--json"]) == 1
    out, err = capsys.readouterr()
    assert list(json.loads(out)["refused"]) == [overlay["name"]] and "in use by a running process" in err
    assert (cache_dir() / overlay["name"] / "manifest.json").exists()
    model.outcore.close()
    del model
    gc.collect()
    assert listed(capsys)["overlay"]["state"] is None
    assert main(["cache", "clear", "--yes"]) == 0
    assert not (cache_dir() / overlay["name"]).exists()
    # And it is made again.
    outcore.load_model(folder, memory="1GB", resident=0, context=64, draft="none")[0].outcore.close()
    assert listed(capsys)["overlay"]["name"] == overlay["name"]


@pytest.mark.parametrize("by_its_own_path", [False, True])
def test_a_packed_copy_that_a_model_was_opened_from_stays(by_its_own_path: bool, tmp_path: Path, capsys: Any) -> None:
    folder = original(tmp_path / "m", num_hidden_layers=2)
    copy = pack_model(folder, None).folder
    lazy = open_model(copy if by_its_own_path else folder)
    assert lazy.checkpoint.folder == copy
    assert main(["cache", "rm", copy.name]) == 1 and copy.exists()
    del lazy
    assert main(["cache", "rm", copy.name]) == 0 and not copy.exists()


def test_a_packed_copy_stays_while_a_draft_inside_it_is_used(tmp_path: Path, capsys: Any) -> None:
    class User: ...

    user, copy = User(), pack_model(original(tmp_path / "m", num_hidden_layers=2), None).folder
    keep(copy / "draft-4bit", user)
    assert listed(capsys)["packed copy"]["state"] == "in use"
    assert main(["cache", "rm", copy.name]) == 1 and (copy / "config.json").exists()
    assert f"{copy.name}/draft-4bit is in use" in capsys.readouterr().err
    del user
    assert main(["cache", "rm", copy.name]) == 0 and not copy.exists()


def test_what_is_being_written_stays(tmp_path: Path, capsys: Any) -> None:
    copy = pack_model(original(tmp_path / "m", num_hidden_layers=2), None).folder
    with (copy / ".lock").open("r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert listed(capsys)["packed copy"]["state"] == "being written"
        assert main(["cache", "clear", "--yes"]) == 1
        assert "is being written" in capsys.readouterr().err and copy.exists()


def test_whoever_begins_to_use_what_is_going_waits_and_finds_a_new_folder(tmp_path: Path) -> None:
    class User: ...

    user, folder = User(), cache_dir() / ("full-m-" + "0" * 16 + "-" + "0" * 8)
    folder.mkdir(parents=True)
    (folder / "half").touch()
    with (folder / ".use").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = threading.Thread(target=keep, args=(folder, user))
        waiting.start()
        time.sleep(0.2)
        assert waiting.is_alive()
        folder.rename(cache_dir() / "removed-1-m")
    waiting.join(60)
    assert [p.name for p in folder.iterdir()] == [".use"]
    with pytest.raises(outcore.StoreError, match="in use by a running process"):
        remove_folder(folder)
    del user
    remove_folder(folder)
    assert not folder.exists()


def test_links_and_foreign_files_are_neither_listed_nor_removed(tmp_path: Path, capsys: Any) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x" * 1000)
    copy = pack_model(original(tmp_path / "m", num_hidden_layers=2), None).folder
    size = listed(capsys)["packed copy"]["bytes"]
    (copy / "inside").symlink_to(outside)
    like_one = cache_dir() / ("full-x-" + "0" * 16 + "-" + "1" * 8)
    like_one.symlink_to(outside)
    (cache_dir() / "kernels").symlink_to(outside)
    (outside / "mlx-1").mkdir()
    (cache_dir() / "own notes").mkdir()
    found = listed(capsys)
    assert list(found) == ["packed copy"] and size <= found["packed copy"]["bytes"] < size + 500
    assert main(["cache", "clear", "--yes"]) == 0
    assert names_in_cache() == sorted([like_one.name, "kernels", "own notes"])
    assert {p.name for p in outside.iterdir()} == {"precious", "mlx-1"}


def test_clear_asks_and_without_a_terminal_it_needs_yes(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = pack_model(original(tmp_path / "m", num_hidden_layers=2), None).folder

    class Typed(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    assert main(["cache", "clear"]) == 2 and copy.exists()
    assert "--force" in capsys.readouterr().err
    for answer, status in (("\n", 1), ("no\n", 1), ("y\n", 0)):
        assert copy.exists()
        monkeypatch.setattr(sys, "stdin", Typed(answer))
        assert main(["cache", "clear"]) == status
        assert "1 item," in capsys.readouterr().err
    assert not copy.exists()


def test_what_a_killed_removal_left_goes_with_the_next(capsys: Any) -> None:
    left = cache_dir() / "removed-1-full-m-0123456789abcdef-01234567"
    left.mkdir(parents=True)
    (left / "layer_0000.safetensors").write_bytes(b"x")
    assert listed(capsys)["remains"]["bytes"] == 1
    assert main(["cache", "clear", "--yes"]) == 0 and not left.exists()


def test_an_age_is_reported_in_its_largest_unit() -> None:
    assert [cache._age(s) for s in (3, 60, 7199, 86_400 * 3)] == ["now", "1 min ago", "1 h ago", "3 d ago"]


def test_folders_of_others_with_names_like_ours_are_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    monkeypatch.setenv("OUTCORE_CACHE", str(shared))
    for name in ("removed-photos-2019", "kernels/mlx-src", "removed-1-holiday"):
        (shared / name).mkdir(parents=True)
        (shared / name / "a.jpg").write_text("x")
    shared.chmod(0o700)
    assert main(["cache", "clear", "--yes"]) == 0
    assert len(list(shared.rglob("a.jpg"))) == 3


def test_a_name_cannot_move_the_terminals_cursor(capsys: Any) -> None:
    (cache_dir() / f"full-\x1b[2Jm-{'0' * 16}-{'0' * 8}").mkdir(parents=True)
    assert main(["cache", "ls"]) == 0
    shown = capsys.readouterr().out
    assert "full-\\x1b[2Jm-" in shown and "\x1b" not in shown


def test_conversations_are_shown_and_only_removed_by_name(tmp_path: Path, capsys: Any) -> None:
    folder = cache_dir() / "sessions"
    folder.mkdir(parents=True)
    for name in ("work", "play"):
        (folder / f"{name}.json").write_text("{}")
        (folder / f"{name}.lock").touch()
    assert main(["cache", "ls"]) == 0
    out = capsys.readouterr().out
    assert "sessions-work" in out and out.count("  conversation  ") == 2
    assert main(["cache", "clear", "--yes"]) == 0
    assert "2 conversations" in capsys.readouterr().err and (folder / "work.json").exists()
    with (folder / "work.lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert main(["cache", "rm", "sessions-work"]) == 1
    assert "in use by a process" in capsys.readouterr().err and (folder / "work.json").exists()
    assert main(["cache", "rm", "sessions-work"]) == 0
    assert sorted(p.name for p in folder.iterdir()) == ["play.json", "play.lock", "work.lock"]


def test_what_was_written_is_told_by_purpose_whether_it_is_still_there_or_not(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["cache", "ls", "--json"]) == 0
    before = json.loads(capsys.readouterr().out)
    assert (before["written"], before["written_since"]) == ([], None) and not (cache_dir() / written.FILE).exists()
    copy = pack_model(original(tmp_path / "m", num_hidden_layers=2), None).folder
    packed = sum(p.stat().st_size for p in copy.glob("*.safetensors"))
    assert packed > 10_000
    # A process that is killed has added up by then, but for less than EACH.
    monkeypatch.setattr(written, "EACH", 100)
    for nbytes in (60, 60, 99):
        written.wrote("conversions", nbytes)
    written._pending.pop("conversions")
    with (cache_dir() / written.FILE).open("a") as file:
        file.write("nonsense\n1 2 \x1b[2J\n1 -5 prompts\n")
    assert main(["cache", "rm", copy.name]) == 0
    capsys.readouterr()
    assert main(["cache", "ls", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["written"] == [{"what": "conversions", "bytes": 120}, {"what": "packed copies", "bytes": packed}]
    assert abs(found["written_since"] - time.time()) < 1000
    assert main(["cache", "ls"]) == 0
    out = capsys.readouterr().out
    assert f": conversions 120 B, packed copies {format_size(packed)}\n" in out and "\x1b" not in out
