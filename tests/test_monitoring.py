"""What a process shows of itself while it runs a model, and to whom."""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
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
from outcore.monitoring import publish, publisher, sockets
from outcore.monitoring.board import Board
from outcore.monitoring.publisher import MOST_WAITING, MOST_WATCHERS, board
from outcore.monitoring.snapshot import TOKENS_S, SnapshotRecorder
from outcore.monitoring.watch import Watched, follow, watch, watch_all
from watching import own_folder, until


@pytest.fixture
def folder() -> Iterator[Path]:
    with own_folder() as made:
        yield made


@pytest.fixture
def others(quick_models: Callable[[int], Path]) -> int:
    """What other tests of this process still hold, in bytes; for a test that names it before :func:`running`."""
    quick_models(6)
    gc.collect()
    return mx.get_active_memory()


@pytest.fixture
def running(quick_models: Callable[[int], Path]) -> Iterator[tuple[Any, Any]]:
    """A model of six layers, all of them streamed."""
    model, tokenizer = outcore.load(
        str(quick_models(6)), memory="32MB", resident=0, context=256, prompt=16, draft="none", govern=False
    )
    yield model, tokenizer
    model.outcore.close()


def one(watched: Watched) -> dict[str, Any]:
    """The next snapshot."""
    return next(line for _, line in follow([watched]) if line["type"] == "snapshot")


def watched() -> Watched:
    """This process, watched."""
    (found,) = watch_all()
    assert found.pid == os.getpid()
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
            if self.over:
                return

    def stop(self) -> None:
        self.over = True
        self.join(20)
        assert not self.is_alive()


# Snapshots


def test_a_snapshot_of_a_streamed_model_says_what_it_does(others: int, running: tuple[Any, Any]) -> None:
    model, tokenizer = running
    session = model.outcore
    mx.reset_peak_memory()  # other tests of this process had more
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
    assert len(last["layers"]) == 6 and set(last["layers"]) <= set("drlc") and "m" not in last["layers"]
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


def test_layers_that_stay_and_those_that_are_computed_are_told_apart(quick_models: Callable[[int], Path]) -> None:
    model, tokenizer = outcore.load(
        str(quick_models(6)), memory="64MB", resident=2, context=128, prompt=16, draft="none", govern=False
    )
    with model.outcore as session:
        recorder, strips = SnapshotRecorder(session, "quick"), set()
        session.streaming.after_unit.join(lambda: strips.add(recorder.take()["layers"]))
        list(outcore.stream_generate(model, tokenizer, "def f", max_tokens=2))
        kept = {i for i in range(6) if all(s[i] == "m" for s in strips)}
        assert kept == set(session.plan.resident) and len(kept) == 2
        computed = {i for i in range(6) if any(s[i] == "c" for s in strips)}
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


# The socket


def test_a_watched_run_tells_four_times_a_second_and_ends_with_its_model(
    folder: Path, running: tuple[Any, Any]
) -> None:
    model, tokenizer = running
    assert publish(model, "generate", "quick") and publish(model), "twice is once"
    assert folder.stat().st_mode & 0o777 == 0o700
    (path,) = folder.iterdir()
    assert path.name == f"{os.getpid()}.sock" and path.stat().st_mode & 0o077 == 0
    watching = watched()
    assert watching.hello["command"] == "generate" and watching.hello["models"] == ["quick"]
    assert watching.hello["version"] == outcore.__version__
    text = Reading(model, tokenizer)
    lines = follow([watching])
    told = [next(lines)[1] for _ in range(5)]
    assert len(told[-1]["models"]) == 1 and told[-1]["models"][0]["tokens"]["made"] > 0
    assert 0.7 < told[-1]["at"] - told[0]["at"] < 5, "four intervals"
    text.stop()
    model.outcore.close()
    assert len(list(lines)) < 20, "it has ended"
    assert list(folder.iterdir()) == [] and watch_all() == []
    watching.close()


def test_nothing_is_taken_while_nobody_watches(
    folder: Path, running: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []
    monkeypatch.setattr(Board, "snapshot", lambda self: taken.append(1) or {"type": "snapshot", "models": []})
    publish(running[0])
    time.sleep(0.6)
    assert taken == []
    watching = watched()
    one(watching)
    watching.close()
    until(lambda: publisher._publisher is not None and not publisher._publisher.watched)
    so_far = len(taken)
    time.sleep(0.6)
    assert len(taken) == so_far >= 1


def test_a_watcher_that_never_reads_is_dropped_and_harms_nobody(
    folder: Path, running: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "EVERY_S", 0.01)
    monkeypatch.setattr(Board, "snapshot", lambda self: {"type": "snapshot", "models": [], "filler": "x" * 50_000})
    publish(running[0])
    lazy = watched()
    other = watched()
    assert sum(len(line["filler"]) for line in (one(other) for _ in range(40))) > 4 * MOST_WAITING
    shown = publisher._publisher
    assert shown is not None
    until(lambda: len(shown._watchers) == 1)
    running[0].outcore.close()
    lazy.close()
    other.close()


@pytest.mark.parametrize("nonsense", [b"{\n", b"[1]\n", b"x" * 9000, b"\xff\n", b'"freeze"\n', b"[" * 4000 + b"\n"])
def test_a_watcher_that_asks_for_nonsense_is_dropped(folder: Path, running: tuple[Any, Any], nonsense: bytes) -> None:
    publish(running[0])
    watching = watched()
    watching.connection.sendall(b'{"do": "dance"}\n\n')
    one(watching)
    watching.connection.sendall(nonsense)
    assert len(list(follow([watching]))) < 20
    again = watched()
    one(again)
    again.close()


def test_too_many_watchers_are_turned_away(folder: Path, running: tuple[Any, Any]) -> None:
    publish(running[0])
    many = [watched() for _ in range(MOST_WATCHERS)]
    assert watch_all() == []
    for each in many:
        each.close()
    until(lambda: [w.close() for w in watch_all()])


def test_what_processes_left_is_removed_and_what_is_not_theirs_is_left(folder: Path, running: tuple[Any, Any]) -> None:
    folder.mkdir(mode=0o700)
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(folder / "1234567.sock"))
    left.close()
    (folder / "99.sock").write_text("no socket")
    (folder / "notes.txt").write_text("")
    (folder / "7.sock").symlink_to(folder / "1234567.sock")
    assert [pid for pid, _ in sockets.found()] == [1234567]
    publish(running[0])
    names = {path.name for path in folder.iterdir()}
    assert names == {"99.sock", "notes.txt", "7.sock", f"{os.getpid()}.sock"}


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
        watch_all()
    with caplog.at_level("INFO", "outcore"):
        assert not publish(running[0])
    assert "outcore monitor cannot see this process" in caplog.text
    assert board.snapshot()["models"], "shown to this process all the same"


def test_a_socket_of_another_user_is_left_alone(
    folder: Path, running: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(running[0])
    (path,) = folder.iterdir()
    monkeypatch.setattr(sockets, "require_private", lambda folder: None)
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    assert sockets.found() == [] and path.exists()


def test_a_path_that_is_too_long_for_a_socket_is_no_reason_to_fail(
    folder: Path, running: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    long = tmp_path / ("long" * 30)
    long.mkdir(mode=0o700)
    monkeypatch.setattr(sockets, "socket_folder", lambda: long / "outcore")
    assert not publish(running[0])


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
    model, _ = outcore.load(str(quick_models(6)), memory="1GB", context=64, prompt=16, draft="none", govern=False)
    publish(model)
    gone = weakref.ref(model.outcore)
    model.outcore.limits()
    del model
    until(lambda: __import__("gc").collect() is not None and gone() is None)
    until(lambda: publisher._publisher is None and list(folder.iterdir()) == [])


def test_a_forked_child_leaves_the_parents_socket_alone(folder: Path, running: tuple[Any, Any]) -> None:
    publish(running[0])
    child = os.fork()
    if child == 0:
        # What a child does at its end, and what it may try.
        import atexit
        import multiprocessing.util

        # Or it would end processes that wait for other tests.
        atexit.unregister(multiprocessing.util._exit_function)
        atexit._run_exitfuncs()
        os._exit(0 if publisher._publisher is None else 1)
    assert os.waitpid(child, 0)[1] == 0
    watching = watched()
    one(watching)
    watching.close()


# Freezing and ending


def test_a_frozen_run_stands_still_and_goes_on_with_the_same_tokens(folder: Path, running: tuple[Any, Any]) -> None:
    model, tokenizer = running
    expected = [r.token for r in outcore.stream_generate(model, tokenizer, "def", max_tokens=12)]
    publish(model)
    watching = watched()
    watching.ask("freeze")
    until(lambda: board.gate.closed)
    until(lambda: one(watching)["frozen"])
    text = Reading(model, tokenizer)
    time.sleep(0.4)
    assert text.tokens == []
    watching.ask("thaw")
    until(lambda: len(text.tokens) >= 12)
    text.stop()
    assert text.tokens[:12] == expected
    assert model.outcore.metrics.held_s > 0.3
    watching.close()


def test_a_resident_run_can_be_frozen_too(folder: Path, quick_models: Callable[[int], Path]) -> None:
    model, tokenizer = outcore.load(str(quick_models(6)), memory="1GB", context=256, prompt=16, draft="none")
    with model.outcore as session:
        assert session.streaming is None
        publish(model)
        board.gate.freeze(self := object())
        text = Reading(model, tokenizer)
        time.sleep(0.3)
        assert len(text.tokens) <= 2
        board.gate.leave(self)
        until(lambda: len(text.tokens) > 8)
        text.stop()


def test_what_a_watcher_froze_goes_on_when_it_has_gone(folder: Path, running: tuple[Any, Any]) -> None:
    publish(running[0])
    first, second = watched(), watched()
    first.ask("freeze")
    second.ask("freeze")
    until(lambda: len(board.gate._askers) == 2)
    first.close()
    until(lambda: len(board.gate._askers) == 1)
    assert board.gate.closed
    second.close()
    until(lambda: not board.gate.closed)


def test_a_frozen_model_can_be_closed_by_another_thread(folder: Path, running: tuple[Any, Any]) -> None:
    model, tokenizer = running
    publish(model)
    board.gate.freeze(object())
    text = Reading(model, tokenizer)
    until(lambda: model.outcore.exclusive.computing)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading, "excepthook", lambda args: None)
        model.outcore.close()
        text.join(20)
    assert not text.is_alive() and not board.gate.closed


ALONE = """if True:
    import types
    from outcore.disk.metrics import Metrics
    from outcore.monitoring import publish
    from outcore.engine.observers import Observers
    from outcore.machine.exclusive import Exclusive

    class Session:  # as good as closed: there is nothing to be told of it
        closed, metrics, passing, closing = True, Metrics(), Observers(), Observers()

    session, exclusive = Session(), Exclusive()
    assert publish(types.SimpleNamespace(outcore=session))
    print("ready", flush=True)
    while True:
        with exclusive:
            session.passing()
"""
"""A process that does what one with a model does between its passes, in a tenth of the time."""


@pytest.mark.parametrize("how", ["quit", "ctrl-c", "killed", "ignored"])
def test_a_frozen_process_ends_when_it_is_asked_to(how: str, folder: Path) -> None:
    ignored = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n" if how == "ignored" else ""
    environment = os.environ | {"XDG_RUNTIME_DIR": str(folder.parent), "PYTHONPATH": os.pathsep.join(sys.path)}
    with heard():
        process = subprocess.Popen(
            [sys.executable, "-c", ignored + ALONE], env=environment, stdout=-1, stderr=-1, text=True
        )
    assert process.stdout is not None and process.stdout.readline() == "ready\n", process.communicate()[1]
    watching = watch(process.pid, folder / f"{process.pid}.sock")
    assert watching is not None
    watching.ask("freeze")
    until(lambda: one(watching)["frozen"])
    if how == "killed":
        process.kill()
    elif how == "ctrl-c":
        process.send_signal(signal.SIGINT)
    else:
        watching.ask("quit")
    _, err = process.communicate(timeout=30)
    watching.close()
    expected = {"killed": -signal.SIGKILL, "ignored": -signal.SIGTERM}.get(how, -signal.SIGINT)
    assert process.returncode == expected, err
    if how in ("quit", "ctrl-c"):
        assert "KeyboardInterrupt" in err and list(folder.iterdir()) == []
    else:
        assert list(folder.iterdir()), "nobody was there to remove it"
        assert watch_all() == [] and list(folder.iterdir()) == []
