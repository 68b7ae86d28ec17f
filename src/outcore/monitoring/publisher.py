"""The thread that hands snapshots out on this process's socket.

It sleeps until somebody connects. Snapshots are taken while somebody is connected, and only then. A watcher that does
not read is dropped; one that asks for nonsense is, too.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import OutcoreError
from ..machine.interrupts import SIGNALS
from ..machine.settings import OFF, setting
from . import sockets
from .board import Board, name_of, program

if TYPE_CHECKING:
    from ..engine.session import Session

EVERY_S = 0.25
"""Seconds from one snapshot to the next."""

MOST_WATCHERS = 16

MOST_WAITING = 1 << 18
"""Bytes that a watcher may leave unread before it is dropped: some seconds of snapshots."""

LONGEST_LINE = 4096
"""Bytes of what a watcher asks."""

board = Board()
"""What this process shows."""


class Watcher:
    """A connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._unsent = bytearray()
        self._asked = bytearray()

    def send(self, line: bytes) -> bool:
        """Send a line, as far as the watcher reads; False: it is to be dropped."""
        if len(self._unsent) > MOST_WAITING:
            return False
        self._unsent += line
        try:
            while self._unsent:
                del self._unsent[: self.connection.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            return False
        return True

    def asked(self) -> list[dict[str, Any]] | None:
        """What it asks; None: it has gone, or is to be dropped."""
        try:
            data = self.connection.recv(LONGEST_LINE)
        except BlockingIOError:
            return []
        except OSError:
            return None
        self._asked += data
        *lines, rest = bytes(self._asked).split(b"\n")
        self._asked = bytearray(rest)
        if not data or len(rest) > LONGEST_LINE:
            return None
        try:
            found = [json.loads(line) for line in lines if line.strip()]
        except (ValueError, RecursionError):
            return None
        return found if all(isinstance(each, dict) for each in found) else None


class Publisher:
    """A thread, the socket that it listens on, and its watchers.

    Raises:
        StoreError, OSError: the socket cannot be made.
    """

    def __init__(self, shown: Board, clock: Callable[[], float] = time.monotonic) -> None:
        folder = sockets.make_folder()
        sockets.remove_stale(folder)
        self._board, self._clock = shown, clock
        self._listening, self.path = sockets.listen(folder)
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listening, selectors.EVENT_READ, self._accept)
        self._selector.register(self._woken, selectors.EVENT_READ, self._look)
        self._watchers: list[Watcher] = []
        self._stopping = False
        # Also where a process ends that never closed its models.
        self._unlink = weakref.finalize(self, _unlink, self.path, os.getpid())
        self._thread = threading.Thread(target=self._run, name="outcore-monitor", daemon=True)
        self._thread.start()

    @property
    def watched(self) -> bool:
        """Whether somebody is connected."""
        return bool(self._watchers)

    def stop(self) -> None:
        """End the thread and remove the socket. Safe to call twice."""
        self._stopping = True
        self._unlink()
        self.nudge()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def nudge(self) -> None:
        """Have the thread look whether anything is left to be shown."""
        with contextlib.suppress(OSError):
            self._wake.send(b".")

    def abandon(self) -> None:
        """In a forked child, which has no such thread: what is the parent's is the parent's."""
        self._unlink.detach()
        self._close()

    def _run(self) -> None:
        # Ctrl-C is for the thread that computes.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            due = self._clock()
            while not self._stopping:
                wait = max(0.0, due - self._clock()) if self._watchers else None
                for key, _ in self._selector.select(wait):
                    key.data()
                if self._watchers and self._clock() >= due:
                    due = self._clock() + EVERY_S
                    self._tell(self._board.snapshot())
        finally:
            self._board.gate.thaw()
            self._close()

    def _close(self) -> None:
        for watcher in self._watchers:
            watcher.connection.close()
        self._watchers = []
        self._selector.close()
        for each in (self._listening, self._wake, self._woken):
            each.close()

    def _look(self) -> None:
        self._woken.recv(64)
        if not self._stopping:
            _end_if_nothing_is_left()

    def _accept(self) -> None:
        try:
            connection, _ = self._listening.accept()
        except OSError:
            return  # it has gone again
        connection.setblocking(False)
        watcher = Watcher(connection)
        if len(self._watchers) >= MOST_WATCHERS or not watcher.send(_line(self._board.hello())):
            connection.close()
            return
        self._watchers.append(watcher)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._hear(watcher))

    def _hear(self, watcher: Watcher) -> None:
        asked = watcher.asked()
        if asked is None:
            self._drop(watcher)
            return
        for line in asked:
            self._board.obey(line, watcher)

    def _tell(self, document: dict[str, Any]) -> None:
        line = _line(document)
        for watcher in [w for w in self._watchers if not w.send(line)]:
            self._drop(watcher)

    def _drop(self, watcher: Watcher) -> None:
        self._board.gate.leave(watcher)
        if watcher in self._watchers:
            self._watchers.remove(watcher)
            self._selector.unregister(watcher.connection)
            watcher.connection.close()


def _line(document: dict[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode() + b"\n"


def _unlink(path: Path, pid: int) -> None:
    if os.getpid() == pid:
        path.unlink(missing_ok=True)


_lock = threading.Lock()
_publisher: Publisher | None = None


def publish(model: Any, command: str | None = None, name: str | None = None) -> bool:
    """Let ``outcore monitor`` see a model, until it is closed or dropped.

    Args:
        model: loaded by ``outcore.load``.
        command: what this process runs; None: as it was started. ``name``: what the model is called; None: its kind.

    Returns:
        whether it can be seen: not where ``OUTCORE_MONITOR`` (or ``monitor`` in the configuration file) is ``off``, or
        no socket can be made, which is logged. ``board`` shows it to this process all the same.
    """
    session: Session = model.outcore
    board.command = command or board.command or program()
    recorder = board.add(session, name or name_of(model))
    if recorder is not None:
        metrics = session.metrics

        def pause() -> None:
            if board.gate.closed:
                metrics.held_s += board.gate.pause()

        def close() -> None:
            board.remove(recorder)
            _end_if_nothing_is_left()

        session.passing.join(pause)
        session.closing.join(close)
        weakref.finalize(session, _nudge).atexit = False
    return _begin()


@contextlib.contextmanager
def staying(command: str) -> Iterator[None]:
    """Let ``outcore monitor`` see this process meanwhile, whether it has a model or not.

    Args:
        command: what it runs.
    """
    board.command = command
    board.staying += 1
    _begin()
    try:
        yield
    finally:
        board.staying -= 1
        _end_if_nothing_is_left()


def _begin() -> bool:
    global _publisher
    if (settled := setting("monitor")) is not None and settled.value == OFF:
        return False
    with _lock:
        if _publisher is None:
            try:
                _publisher = Publisher(board)
            except (OSError, OutcoreError) as e:
                logging.getLogger("outcore").info("outcore monitor cannot see this process: %s", e)
                return False
    return True


def _end_if_nothing_is_left() -> None:
    global _publisher
    with _lock:
        if board.any_left():
            return
        publisher, _publisher = _publisher, None
    if publisher is not None:
        publisher.stop()


def _nudge() -> None:
    """A model was dropped. Any thread may come by here at any time, with any lock held: the publisher looks itself."""
    if (publisher := _publisher) is not None:
        publisher.nudge()


def _forked() -> None:
    global _publisher, _lock
    _lock = threading.Lock()
    board.forked()
    if _publisher is not None:
        _publisher.abandon()
    _publisher = None


os.register_at_fork(after_in_child=_forked)
