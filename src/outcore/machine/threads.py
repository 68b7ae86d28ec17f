"""When a thread has really ended."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

TASKS = Path("/proc/self/task")

MOST_S = 10.0


def join(thread: threading.Thread, timeout_s: float | None = None, tasks: Path = TASKS) -> None:
    """Wait until a thread has ended, for the system too.

    Before Python 3.13, ``join`` waits for the thread's Python code. What C++ keeps for a thread is destroyed after it:
    MLX's compiled functions, for which it takes Python's lock. Where Python is at its own end by then, the process
    aborts ("terminate called without an active exception").
    """
    thread.join(timeout_s)
    if thread.is_alive() or sys.version_info >= (3, 13):
        return
    if not tasks.is_dir():
        time.sleep(0.1)  # macOS lists no threads of a process; this is many times what it takes
        return
    task, end = tasks / str(thread.native_id), time.monotonic() + MOST_S
    while task.exists() and time.monotonic() < end:
        time.sleep(0.002)
