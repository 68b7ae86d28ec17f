"""What presses on a control group while a model runs in it: a limit that falls, a neighbour that takes memory."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pressed
from benchmark import SAME_OUTCORE, Result
from cgroup import Cgroup

RETRY_S = 0.25
"""Seconds between two tries to lower a limit."""


class Lowering(threading.Thread):
    """Writes a limit until the kernel takes it, or ``stop`` is called."""

    def __init__(self, group: Cgroup, limit: int) -> None:
        super().__init__(daemon=True)
        self.group, self.limit = group, limit
        self.tries = 0
        self.seconds: float | None = None  # until it was taken
        self._done = threading.Event()

    def run(self) -> None:
        began = time.perf_counter()
        while not self._done.is_set():
            self.tries += 1
            try:
                self.group.set_limit(self.limit)
            except OSError as e:
                if e.errno != errno.EBUSY:
                    raise
                self._done.wait(RETRY_S)
            else:
                self.seconds = time.perf_counter() - began
                return

    def end(self) -> Result:
        """Try no more; what came of it."""
        self._done.set()
        self.join()
        return {"limit_bytes": self.limit, "tries": self.tries, "seconds": self.seconds}


class Neighbour:
    """A second process in the group, that holds as much memory as it is told to."""

    def __init__(self, group: Cgroup) -> None:
        self.process = subprocess.Popen(
            group.wrap(pressed.command("neighbour", {})),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | SAME_OUTCORE,
        )  # fmt: skip
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        self.most = 0
        self.hold(0)

    def hold(self, nbytes: int) -> None:
        """Hold so many bytes in all from now on."""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(f"{nbytes}\n")
            self.process.stdin.flush()
            self.most = max(self.most, int(self.process.stdout.readline() or 0))
        except (OSError, ValueError):
            self._done.set()  # it was killed

    def grow(self, to: int, step: int, every_s: float) -> None:
        """Take ``step`` more each ``every_s`` seconds, in a thread of its own."""

        def steps() -> None:
            for held in range(step, to + step, step):
                if self._done.wait(every_s):
                    return
                self.hold(min(held, to))

        self._thread = threading.Thread(target=steps, daemon=True)
        self._thread.start()

    def free(self) -> None:
        """Grow no more, and give all back."""
        self._done.set()
        if self._thread is not None:
            self._thread.join()
        self.hold(0)

    def close(self) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join()
        self.process.kill()
        self.process.wait()


@contextmanager
def closing_all(others: list[Neighbour]) -> Iterator[None]:
    """Ends neighbours that came meanwhile: a group with processes in it cannot be removed."""
    try:
        yield
    finally:
        for other in others:
            other.close()
