"""Threads that have ended for Python, and not yet for the system."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import pytest

from outcore.system import threads


def test_a_thread_is_waited_for_until_the_system_has_ended_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 12))
    thread = threading.Thread(target=lambda: None)
    thread.start()
    task = tmp_path / str(thread.native_id)
    task.touch()
    ender = threading.Timer(0.1, task.unlink)
    began = time.monotonic()
    ender.start()
    threads.join(thread, tasks=tmp_path)
    assert not task.exists() and time.monotonic() - began >= 0.1
    ender.join()
    # One that does not end is not waited for longer than was asked.
    stays = threading.Event()
    thread = threading.Thread(target=stays.wait)
    thread.start()
    threads.join(thread, 0.01)
    assert thread.is_alive()
    stays.set()
    threads.join(thread)
    assert not (threads.TASKS / str(thread.native_id)).exists()
