"""What a process shows of itself while it runs a model, and to whom."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import outcore
from interrupts import heard
from outcore.errors import StoreError, UsageError
from outcore.machine.allocator import reset_peak
from outcore.monitoring import publish, publisher
from outcore.monitoring.publisher import TOKENS_S, SnapshotRecorder, board
from outcore_tools.processes import read_all
from quick_transformers import python_path
from watching import made_up, own_folder, until

LAYERS = 3


@pytest.fixture
def folder() -> Iterator[Path]:
    with own_folder() as made:
        yield made


@pytest.fixture
def others(quick_models: Callable[[int], Path]) -> int:
    """What other tests of this process still hold, in bytes; for a test that names it before :func:`running`."""
    quick_models(LAYERS)
    gc.collect()
    return mx.get_active_memory()


@pytest.fixture
def running(quick_models: Callable[[int], Path]) -> Iterator[tuple[Any, Any]]:
    """A model all of whose layers are streamed."""
    model, tokenizer = outcore.load(
        str(quick_models(LAYERS)), memory="32MB", resident=0, context=256, prompt=16, draft="none", govern=False
    )
    yield model, tokenizer
    model.outcore.close()


def one() -> dict[str, Any]:
    """The one process that can be seen."""
    (found,) = read_all()
    return found


class Reading(threading.Thread):
    """A text that is written by a thread until it is told to stop."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        super().__init__(daemon=True)
        self.model, self.tokenizer = model, tokenizer
        self.tokens: list[int] = []
        self.over = False
        self.start()

    def run(self) -> None:
        for response in outcore.stream_generate(self.model, self.tokenizer, "def", max_tokens=-1):
            self.tokens.append(response.token)
            time.sleep(0.01)  # it is looked at for a while
            if self.over:
                return

    def stop(self) -> None:
        self.over = True
        self.join(60)
        assert not self.is_alive()


# Snapshots


def test_a_snapshot_of_a_streamed_model_says_what_it_does(others: int, running: tuple[Any, Any]) -> None:
    model, tokenizer = running
    session = model.outcore
    reset_peak()  # other tests of this process had more
    now = [100.0]
    recorder = SnapshotRecorder(session, "quick", clock=lambda: now[0])
    first = recorder.take()
    assert first is not None and first["tokens"]["per_s"] is None and first["disk"]["gbps"] is None
    read, seen = session.metrics.bytes_read, []
    for response in outcore.stream_generate(model, tokenizer, "def f", max_tokens=8):
        assert response.token is not None
        now[0] += 0.5
        taken = recorder.take()
        json.dumps(taken, allow_nan=False)
        assert taken is not None
        seen.append(taken)
    last, plan, m = seen[-1], session.plan, session.metrics
    assert last["state"] == "working" and last["name"] == "quick"
    assert (last["tokens"]["made"], last["tokens"]["sweeps"]) == (8, m.sweeps) == (8, 8)
    assert last["tokens"]["per_s"] == 2.0 and last["tokens"]["per_sweep"] == 1.0
    assert last["disk"]["gbps"] == pytest.approx((m.bytes_read - read) / 8 * 2 / 1e9, rel=0.5)
    assert last["disk"]["bytes"] == m.bytes_read
    assert len(last["layers"]) == LAYERS and set(last["layers"]) <= set("drlc") and "m" not in last["layers"]
    assert any(set(s["layers"]) & set("rl") for s in seen), "what lies in slots is never seen"
    memory = last["memory"]
    parts = [memory[p] for p in ("weights", "slots", "experts", "caches", "activations", "allocator")]
    assert sum(parts) == memory["planned"] == plan.peak_bytes and memory["budget"] == 32_000_000
    assert others < memory["active"] <= memory["peak"] <= memory["budget"] + others
    now[0] += 3 * TOKENS_S
    rested = recorder.take()
    assert rested is not None and rested["state"] == "idle" and rested["tokens"]["per_s"] is None
    session.close()
    assert recorder.take() is None


def test_resident_and_computed_layers_have_different_letters(quick_models: Callable[[int], Path]) -> None:
    model, tokenizer = outcore.load(
        str(quick_models(LAYERS)), memory="64MB", resident=2, context=128, prompt=16, draft="none", govern=False
    )
    with model.outcore as session:
        recorder, strips = SnapshotRecorder(session, "quick"), set()
        session.streaming.after_unit.append(lambda: strips.add(recorder.take()["layers"]))
        list(outcore.stream_generate(model, tokenizer, "def f", max_tokens=2))
        kept = {i for i in range(LAYERS) if all(s[i] == "m" for s in strips)}
        assert kept == set(session.plan.resident) and len(kept) == 2
        computed = {i for i in range(LAYERS) if any(s[i] == "c" for s in strips)}
        assert computed == set(session.plan.streamed), strips


def test_counters_that_were_reset_give_no_negative_rates(running: tuple[Any, Any]) -> None:
    session = running[0].outcore
    now = [0.0]
    recorder = SnapshotRecorder(session, "quick", clock=lambda: now[0])
    session.metrics.sweeps = 9
    recorder.take()
    session.metrics.reset()
    now[0] += 1
    taken = recorder.take()
    assert taken is not None and taken["tokens"]["sweeps_per_s"] is None


# The file


def test_a_watched_run_tells_what_it_does_and_its_file_goes_with_its_model(
    folder: Path, running: tuple[Any, Any]
) -> None:
    model, tokenizer = running
    assert publish(model, "generate", "quick") and publish(model), "twice is once"
    assert folder.stat().st_mode & 0o777 == 0o700
    (path,) = folder.iterdir()
    assert path.name == f"{os.getpid()}.json" and path.stat().st_mode & 0o077 == 0
    first = one()
    assert (first["pid"], first["command"]) == (os.getpid(), "generate")
    assert [m["name"] for m in first["models"]] == ["quick"]
    text = Reading(model, tokenizer)
    until(lambda: one()["models"][0]["tokens"]["made"] > first["models"][0]["tokens"]["made"])
    began, ats = time.monotonic(), set()
    while time.monotonic() < began + 1.2:
        ats.add(one()["at"])
        time.sleep(0.02)
    assert len(ats) <= 7, "at most a few times a second"
    text.stop()
    model.outcore.close()
    assert list(folder.iterdir()) == [] and read_all() == []


def test_a_file_is_always_whole_and_is_written_again_where_it_was_lost(folder: Path, running: tuple[Any, Any]) -> None:
    publish(running[0])
    (path,) = folder.iterdir()

    def idle() -> bool:
        before = path.stat()
        time.sleep(0.6)
        return path.stat().st_mtime_ns == before.st_mtime_ns

    until(idle, 60)  # an idle process writes nothing
    path.unlink()
    until(path.exists)
    document = json.loads(path.read_text())
    for n in range(70):
        publisher.write(path, document | {"filler": "x" * (n % 7) * 10_000})
        assert read_all()


def test_what_processes_left_is_removed_and_what_is_not_theirs_is_left(folder: Path, running: tuple[Any, Any]) -> None:
    folder.mkdir(mode=0o700)
    left = dict(made_up(), pid=4194305)  # larger than any of Linux's
    (folder / "4194305.json").write_text(json.dumps(left))
    (folder / f"{os.getppid()}.json").write_text(json.dumps(dict(left, pid=os.getppid())))
    os.utime(folder / f"{os.getppid()}.json", (0, 0))  # written before the process that has the number now began
    (folder / "notes.txt").write_text("")
    (folder / "7.json").symlink_to(folder / "notes.txt")
    publish(running[0])
    assert [p["pid"] for p in read_all()] == [os.getpid()]
    assert {path.name for path in folder.iterdir()} == {"7.json", "notes.txt", f"{os.getpid()}.json"}


@pytest.mark.parametrize("nonsense", [b"{", b"[1]", b"\xff", b"[" * 4000, b"{}", b'{"type": "snapshot", "pid": 1}'])
def test_a_file_that_is_no_snapshot_is_not_shown(folder: Path, nonsense: bytes) -> None:
    folder.mkdir(mode=0o700)
    (folder / f"{os.getpid()}.json").write_bytes(nonsense)
    assert read_all() == [] and list(folder.iterdir())


@pytest.mark.parametrize("wrong", ["open", "owner", "link", "file", "above"])
def test_a_folder_that_others_could_use_is_refused_by_both_sides(
    folder: Path,
    running: tuple[Any, Any],
    wrong: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if wrong == "link":
        (folder.parent / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(folder.parent / "elsewhere")
    elif wrong == "file":
        folder.write_text("")
    else:
        folder.mkdir(mode=0o700)
    if wrong == "open":
        folder.chmod(0o750)
    if wrong == "above":
        folder.parent.chmod(0o777)
    if wrong == "owner":
        monkeypatch.setattr(os, "geteuid", lambda: 4711)
    with pytest.raises(StoreError, match=str(folder.parent)):
        read_all()
    with caplog.at_level("INFO", "outcore"):
        assert not publish(running[0])
    assert "outcore monitor cannot see this process" in caplog.text
    assert board.snapshot()["models"], "shown to this process all the same"


def test_the_setting_switches_it_off(
    folder: Path, running: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OUTCORE_MONITOR", "off")
    assert not publish(running[0]) and not folder.exists()
    monkeypatch.delenv("OUTCORE_MONITOR")
    (tmp_path / "config.toml").write_text('monitor = "off"')
    monkeypatch.setenv("OUTCORE_CONFIG", str(tmp_path / "config.toml"))
    assert not publish(running[0])
    monkeypatch.setenv("OUTCORE_MONITOR", "maybe")
    with pytest.raises(UsageError, match="OUTCORE_MONITOR: maybe: give on or off"):
        publish(running[0])


def test_a_model_that_was_dropped_ends_the_thread(folder: Path, quick_models: Callable[[int], Path]) -> None:
    model, _ = outcore.load(str(quick_models(LAYERS)), memory="1GB", context=64, prompt=16, draft="none", govern=False)
    publish(model)
    gone = weakref.ref(model.outcore)
    del model
    until(lambda: __import__("gc").collect() is not None and gone() is None)
    until(lambda: list(folder.iterdir()) == [])


def test_a_forked_child_leaves_the_parents_file_alone(folder: Path, running: tuple[Any, Any]) -> None:
    publish(running[0])
    child = os.fork()
    if child == 0:
        board.end()  # as at its end
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert one()["pid"] == os.getpid()


ALONE = """if True:
    import sys, time
    import outcore, outcore.monitoring

    model = outcore.load_model(sys.argv[1], memory="1GB", context=64, draft="none")[0]
    assert outcore.monitoring.publish(model, "chat")
    print("ready", flush=True)
    while True:
        time.sleep(0.1)  # a signal that comes just before a sleep does not end it
"""


def test_a_process_that_ends_without_closing_leaves_nothing_to_be_seen(
    folder: Path, quick_models: Callable[[int], Path]
) -> None:
    """By a kill, as nothing of it can clean up then."""
    environment = os.environ | {"XDG_RUNTIME_DIR": str(folder.parent), "PYTHONPATH": python_path(*map(Path, sys.path))}
    command = [sys.executable, "-X", "faulthandler", "-c", ALONE, str(quick_models(2))]
    with heard():
        process = subprocess.Popen(command, env=environment, stdout=-1, stderr=-1, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n", process.communicate()[1]
        assert [p["pid"] for p in read_all()] == [process.pid]
        process.kill()
        # Not waited for: a zombie has ended, too.
        until(lambda: read_all() == [] and list(folder.iterdir()) == [], 60)
        assert process.wait(60) == -signal.SIGKILL
    finally:
        # One that has not ended says where it is.
        process.send_signal(signal.SIGABRT)
        print(process.communicate(timeout=30)[1])
