"""Threads: when they have ended for the system, too, and which of them has the model."""

from __future__ import annotations

import signal
import sys
import threading
import time
from pathlib import Path

import pytest

import interrupts
from outcore.machine.exclusive import TASKS, Exclusive, join


def test_a_thread_is_waited_for_until_the_system_has_ended_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 12))
    thread = threading.Thread(target=lambda: None)
    thread.start()
    task = tmp_path / str(thread.native_id)
    task.touch()
    ender = threading.Timer(0.1, task.unlink)
    began = time.monotonic()
    ender.start()
    join(thread, tasks=tmp_path)
    assert not task.exists() and time.monotonic() - began >= 0.1
    ender.join()
    # One that does not end is not waited for longer than was asked.
    stays = threading.Event()
    thread = threading.Thread(target=stays.wait)
    thread.start()
    join(thread, 0.01)
    assert thread.is_alive()
    stays.set()
    join(thread)
    assert not (TASKS / str(thread.native_id)).exists()


def test_a_signal_while_a_model_is_taken_leaves_it_free() -> None:
    def clock() -> float:
        if signals:
            signal.raise_signal(signals.pop())
        return 0.0

    signals = [signal.SIGINT]
    exclusive = Exclusive(clock)
    with interrupts.heard(), pytest.raises(KeyboardInterrupt):
        exclusive.hold()
    others: list[threading.Thread] = []
    thread = threading.Thread(target=lambda: others.append(exclusive.hold()))
    thread.start()
    thread.join(60)
    free = others == [thread]
    exclusive.give_back(threading.current_thread())
    thread.join()
    assert free
