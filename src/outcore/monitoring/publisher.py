"""Publishes snapshots of this process's models: a thread writes them to a file several times a second."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import OutcoreError
from ..machine.exclusive import SIGNALS
from ..machine.settings import OFF, setting
from . import files
from .snapshot import SnapshotRecorder

if TYPE_CHECKING:
    from ..engine.session import Session

EVERY_S = 0.25
"""Seconds between snapshots; an unchanged one is not written again."""


class Board:
    """The published models of this process. Thread-safe; computing never waits for its lock.

    Attributes:
        command: the name of what this process runs.
    """

    def __init__(self) -> None:
        self.command = ""
        self._lock = threading.RLock()
        self._recorders: list[SnapshotRecorder] = []
        self._stop: threading.Event | None = None  # ends the writer thread; None: no thread runs
        self._path = Path()
        self._written: dict[str, Any] = {}

    def snapshot(self) -> dict[str, Any]:
        """Returns the state of the process and its models (fields: docs/usage.md)."""
        with self._lock:
            models = [taken for r in self._recorders if (taken := r.take()) is not None]
        at, pid = round(time.time(), 3), os.getpid()
        return {"type": "snapshot", "at": at, "pid": pid, "command": self.command, "models": models}

    def add(self, session: Session, name: str) -> None:
        with self._lock:
            if not any(r.session is session for r in self._recorders):
                recorder = SnapshotRecorder(session, name)
                self._recorders.append(recorder)
                session.closing.append(lambda: self._remove(recorder))

    def begin(self) -> bool:
        """Writes the first snapshot and starts the thread. Returns whether other processes can see the snapshots."""
        if (configured := setting("monitor")) is not None and configured.value == OFF:
            return False
        with self._lock:
            if self._stop is None:
                try:
                    self._path = files.make_folder() / f"{os.getpid()}.json"
                    self._write()
                except (OSError, OutcoreError) as e:
                    logging.getLogger("outcore").info("outcore monitor cannot see this process: %s", e)
                    return False
                self._stop = threading.Event()
                threading.Thread(target=self._run, args=(self._stop,), name="outcore-monitor", daemon=True).start()
        return True

    def end(self) -> None:
        """Stops writing and removes the file. May be called twice."""
        with self._lock:
            if self._stop is not None:
                self._stop.set()
                self._stop = None
                self._path.unlink(missing_ok=True)

    def forked(self) -> None:
        """Forgets, in a forked child, the thread and the file, which are the parent's."""
        self._lock, self._stop = threading.RLock(), None

    def _remove(self, recorder: SnapshotRecorder | None) -> None:
        """Removes a model and those that are closed or dropped; stops when none is left."""
        with self._lock:
            self._recorders = [r for r in self._recorders if r is not recorder and r.session is not None]
            if not self._recorders:
                self.end()

    def _write(self) -> None:
        document = self.snapshot()
        if document | {"at": self._written.get("at")} != self._written or not self._path.exists():
            files.write(self._path, document)
            self._written = document

    def _run(self, stop: threading.Event) -> None:
        # Signals are for the main thread.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        while not stop.wait(EVERY_S):
            with self._lock, contextlib.suppress(OSError):  # a full disk, for example; the next write may work
                self._remove(None)
                if not stop.is_set():
                    self._write()


board = Board()

atexit.register(board.end)  # models may never be closed
os.register_at_fork(after_in_child=board.forked)


def publish(model: Any, command: str | None = None, name: str | None = None) -> bool:
    """Lets ``outcore monitor`` see a model until it is closed or dropped.

    Args:
        model: a model from ``outcore.load``.
        command: the name of what this process runs; None: the name of its program.
        name: the model's name; None: its type.

    Returns:
        Whether other processes can see it: False if ``OUTCORE_MONITOR`` (or ``monitor`` in the configuration file) is
        ``off``, or if the file cannot be written, which is logged. This process's ``board`` has the model either way.
    """
    board.command = command or board.command or (Path(sys.argv[0]).name if sys.argv else "") or "python"
    kind = getattr(getattr(model, "args", None), "model_type", None)
    board.add(model.outcore, name or str(kind or type(model).__name__))
    return board.begin()
