"""What this process shows of itself: snapshots of its running models; and what a watcher may ask of it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..machine.interrupts import wait
from .snapshot import SnapshotRecorder

if TYPE_CHECKING:
    from ..engine.session import Session

PROTOCOL = 1

VERSION = str(getattr(sys.modules[__name__.partition(".")[0]], "__version__", ""))
"""Outcore's, without importing the face of the package, which knows all rooms."""


class PauseGate:
    """Holds passes up while somebody asks for it. Ctrl-C gets through, and so does ``close``."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self._askers: set[object] = set()

    @property
    def closed(self) -> bool:
        return not self._open.is_set()

    def freeze(self, asker: object) -> None:
        """Hold passes up, until ``asker`` lets them go, or has gone, or somebody lets all go."""
        self._askers.add(asker)
        self._open.clear()

    def leave(self, asker: object) -> None:
        """``asker`` has gone: nothing stays frozen that nobody looks at."""
        self._askers.discard(asker)
        if not self._askers:
            self._open.set()

    def thaw(self) -> None:
        """Let passes go, whoever asked."""
        self._askers.clear()
        self._open.set()

    def pause(self) -> float:
        """Called before a pass: wait while it is closed. Returns seconds."""
        if self._open.is_set():
            return 0.0
        began = time.perf_counter()
        wait(self._open)
        return time.perf_counter() - began


class Board:
    """The models of this process that may be looked at. Safe for several threads; no lock of it is held by one that
    computes.

    Attributes:
        staying: those who want the process to be seen without any model, too.
    """

    def __init__(self) -> None:
        self.gate = PauseGate()
        self.command = ""
        self.staying = 0
        self._lock = threading.Lock()
        self._recorders: list[SnapshotRecorder] = []
        self._began = time.time()
        self._interrupted = False

    def add(self, session: Session, name: str) -> SnapshotRecorder | None:
        """Show a model too; None: it is shown already."""
        recorder = SnapshotRecorder(session, name)
        with self._lock:
            if any(r.of(session) for r in self._recorders):
                return None
            self._recorders = [*self._recorders, recorder]
        return recorder

    def remove(self, recorder: SnapshotRecorder) -> None:
        """Show a model no more. Nothing is held up that it could wait for."""
        self.gate.thaw()
        with self._lock:
            self._recorders = [r for r in self._recorders if r is not recorder]

    def any_left(self) -> bool:
        """Whether there is anything to be shown; models that were dropped are forgotten."""
        with self._lock:
            self._recorders = [r for r in self._recorders if not r.gone]
            return bool(self._recorders or self.staying)

    def forked(self) -> None:
        """In a child, another thread's locks are nobody's."""
        self._lock = threading.Lock()
        self.gate = PauseGate()

    def hello(self) -> dict[str, Any]:
        """The first line for a watcher."""
        return {
            "type": "hello",
            "protocol": PROTOCOL,
            "version": VERSION,
            "pid": os.getpid(),
            "command": self.command or "python",
            "models": [r.name for r in self._recorders],
            "began": round(self._began, 3),
        }

    def snapshot(self) -> dict[str, Any]:
        """All models as they are now."""
        with self._lock:
            models = [taken for r in self._recorders if (taken := r.take()) is not None]
        return {"type": "snapshot", "at": round(time.time(), 3), "frozen": self.gate.closed, "models": models}

    def obey(self, line: dict[str, Any], watcher: object) -> None:
        """Do what a watcher asks: ``freeze``, ``thaw`` or ``quit``. Anything else may be a newer one's: ignored."""
        match line.get("do"):
            case "freeze":
                self.gate.freeze(watcher)
            case "thaw":
                self.gate.thaw()
            case "quit":
                self.gate.thaw()
                self._interrupt()

    def _interrupt(self) -> None:
        """As Ctrl-C, the first time; a request to end where that is ignored, or has not done it."""
        heard = callable(signal.getsignal(signal.SIGINT)) and not self._interrupted
        self._interrupted = True
        main = threading.main_thread().ident
        assert main is not None
        # To the main thread: one that waits in a system call goes on waiting if another takes it.
        signal.pthread_kill(main, signal.SIGINT if heard else signal.SIGTERM)


def name_of(model: Any) -> str:
    """What a model is called where nobody said: its kind."""
    kind = getattr(getattr(model, "args", None), "model_type", None)
    return str(kind or type(model).__name__)


def program() -> str:
    """What this process runs, for people."""
    return Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "python"
