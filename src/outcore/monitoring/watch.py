"""This user's processes that can be watched, and what they tell. Imports no MLX."""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from . import sockets

LONGEST_LINE = 1 << 20
"""Bytes of a snapshot; one that is longer is no snapshot."""


class Watched:
    """A connection to a process.

    Attributes:
        pid: of the process.
        hello: what it said of itself: ``version``, ``command``, ``models``. ``early``: what came together with it.
    """

    def __init__(self, pid: int, path: Path, connection: socket.socket) -> None:
        self.pid, self.path = pid, path
        self.connection = connection
        self._read = b""
        self.early: list[dict[str, Any]] = []
        self.hello: dict[str, Any] = {}

    def greet(self) -> bool:
        """Wait for its first line; False: it says nothing that this version understands."""
        with contextlib.suppress(OSError, ValueError):
            while (lines := self.receive()) is not None:
                if lines:
                    self.hello, *self.early = lines
                    return self.hello.get("type") == "hello"
        return False

    def receive(self) -> list[dict[str, Any]] | None:
        """What it told since; waits for something. None: it has ended.

        Raises:
            ValueError: what it tells is no line of JSON objects.
        """
        try:
            data = self.connection.recv(1 << 16)
        except ConnectionResetError:
            return None
        return self.taken(data) if data else None

    def taken(self, data: bytes) -> list[dict[str, Any]]:
        """The lines that end with this data.

        Raises:
            ValueError: as above.
        """
        *lines, self._read = (self._read + data).split(b"\n")
        if len(self._read) > LONGEST_LINE:
            raise ValueError(f"process {self.pid}: a line of over {LONGEST_LINE} bytes")
        found = [json.loads(line) for line in lines]
        if not all(isinstance(each, dict) for each in found):
            raise ValueError(f"process {self.pid}: a line that is no object")
        return found

    def ask(self, what: str) -> None:
        """Ask it to ``freeze``, ``thaw`` or ``quit``."""
        with contextlib.suppress(OSError):
            self.connection.sendall(json.dumps({"do": what}).encode() + b"\n")

    def close(self) -> None:
        """Watch it no more."""
        self.connection.close()


def watch(pid: int, path: Path) -> Watched | None:
    """A connection to a process that has said hello; None: it is gone, or does not answer."""
    try:
        connection = sockets.connect(path)
    except OSError:
        return None
    if connection is None:
        return None
    watched = Watched(pid, path, connection)
    if not watched.greet():
        watched.close()
        return None
    return watched


def watch_all(pid: int | None = None) -> list[Watched]:
    """Connections to all of this user's processes, or to one.

    Raises:
        StoreError: where their sockets lie is not this user's alone.
    """
    chosen = [(n, path) for n, path in sockets.found() if pid in (None, n)]
    return [watched for n, path in chosen if (watched := watch(n, path)) is not None]


def follow(processes: Sequence[Watched]) -> Iterator[tuple[Watched, dict[str, Any]]]:
    """What processes tell, until all of them have ended. Those that tell nonsense have."""
    with selectors.DefaultSelector() as selector:
        for each in processes:
            selector.register(each.connection, selectors.EVENT_READ, each)
            early, each.early = each.early, []
            for line in early:
                yield each, line
        while selector.get_map():
            for key, _ in selector.select():
                watched: Watched = key.data
                try:
                    lines = watched.receive()
                except (OSError, ValueError):
                    lines = None
                if lines is None:
                    selector.unregister(watched.connection)
                    watched.close()
                for line in lines or ():
                    yield watched, line
