"""What this process shows of itself, and the thread that writes it down a few times a second."""

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
from ..machine.held_signals import SIGNALS
from ..machine.settings import OFF, setting
from . import files
from .snapshot import SnapshotRecorder

if TYPE_CHECKING:
    from ..engine.session import Session

EVERY_S = 0.25
"""Seconds from one snapshot to the next; one that says the same is not written again."""


class Board:
    """The models of this process that are shown. Safe for several threads; a thread that computes waits for none of its
    locks.

    Attributes:
        command: what this process runs.
    """

    def __init__(self) -> None:
        self.command = ""
        self._lock = threading.RLock()
        self._recorders: list[SnapshotRecorder] = []
        self._stop: threading.Event | None = None  # ends the thread that writes; None: there is none
        self._path = Path()
        self._written: dict[str, Any] = {}

    def snapshot(self) -> dict[str, Any]:
        """The process and all its models as they are now; docs/usage.md says what is in it."""
        with self._lock:
            models = [taken for r in self._recorders if (taken := r.take()) is not None]
        at, pid = round(time.time(), 3), os.getpid()
        return {"type": "snapshot", "at": at, "pid": pid, "command": self.command, "models": models}

    def add(self, session: Session, name: str) -> None:
        """Show a model too, until it is closed or dropped."""
        with self._lock:
            if not any(r.session is session for r in self._recorders):
                recorder = SnapshotRecorder(session, name)
                self._recorders.append(recorder)
                session.closing.append(lambda: self._remove(recorder))

    def begin(self) -> bool:
        """Write the first snapshot and start the thread; returns whether others can see the process."""
        if (settled := setting("monitor")) is not None and settled.value == OFF:
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
        """Write no more, and remove the file. Safe to call twice."""
        with self._lock:
            if self._stop is not None:
                self._stop.set()
                self._stop = None
                self._path.unlink(missing_ok=True)

    def forked(self) -> None:
        """In a forked child: the thread and its file are the parent's."""
        self._lock, self._stop = threading.RLock(), None

    def _remove(self, recorder: SnapshotRecorder | None) -> None:
        """Show this model no more, nor those that are gone; end if none is left."""
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
        # Ctrl-C is for the thread that computes.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        while not stop.wait(EVERY_S):
            with self._lock, contextlib.suppress(OSError):  # a full disk, say: the next one may be written
                self._remove(None)
                if not stop.is_set():
                    self._write()


board = Board()
"""What this process shows."""

atexit.register(board.end)  # also where models were never closed
os.register_at_fork(after_in_child=board.forked)


def publish(model: Any, command: str | None = None, name: str | None = None) -> bool:
    """Let ``outcore monitor`` see a model, until it is closed or dropped.

    Args:
        model: loaded by ``outcore.load``.
        command: what this process runs; None: as it was started. ``name``: what the model is called; None: its kind.

    Returns:
        whether it can be seen: not where ``OUTCORE_MONITOR`` (or ``monitor`` in the configuration file) is ``off``, or
        no file can be written, which is logged. ``board`` shows it to this process all the same.
    """
    board.command = command or board.command or (Path(sys.argv[0]).name if sys.argv else "") or "python"
    kind = getattr(getattr(model, "args", None), "model_type", None)
    board.add(model.outcore, name or str(kind or type(model).__name__))
    return board.begin()
