"""The folders that the same bytes are read from: a model's own, and mirrors of it on other disks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import ReadError
from .disk_calls import DiskCalls
from .open_file import OpenFile, open_file, state_of


@dataclass(eq=False)
class Replica:
    """A folder to read from.

    Attributes:
        folder: as people call it.
        copies: files of the model → its copies of them; None: it is the model's own folder.
        states: what tells each copy from what it was when it was compared (``state_of``).
        lost: why it is not read any more; None: it is.
        nbytes: bytes that were read from it.
    """

    folder: Path
    copies: Mapping[Path, Path] | None = None
    states: Mapping[Path, tuple[int, ...]] | None = None
    lost: str | None = None
    nbytes: int = 0

    def changed(self, copy: Path) -> bool:
        """Whether one of its copies is not the file any more that was compared."""
        return self.states is not None and state_of(copy) != self.states.get(copy)


class Replicas:
    """A model's own folder and its mirrors, for as long as the model lives: who was lost stays lost.

    Attributes:
        all: the own folder first.
        note: is told, in any thread, when one is lost.
    """

    def __init__(self, folder: Path, mirrors: Sequence[Replica] = (), note: Callable[[str], None] = lambda _: None):
        self.all = (Replica(folder), *mirrors)
        self.note = note
        self._lock = threading.Lock()

    @property
    def mirrors(self) -> tuple[Replica, ...]:
        """All but the model's own folder."""
        return self.all[1:]

    def open(self, file: Path, io: str, calls: DiskCalls) -> dict[int, OpenFile]:
        """Open a file of the model in each folder that has it; by the folders' numbers. Who has it no more, or not
        as it was compared, is lost.

        Raises:
            ReadError, UsageError: as ``open_file``, where nobody has it.
        """
        found: dict[int, OpenFile] = {}
        failed: dict[int, ReadError] = {}
        for n, replica in enumerate(self.all):
            copy = file if replica.copies is None else replica.copies.get(file)
            if copy is None or (n and replica.lost is not None):
                continue
            try:
                opened = open_file(copy, io, calls)
                if replica.changed(copy):
                    opened.close(calls)
                    raise ReadError(f"{copy}: was written to")
                found[n] = opened
            except ReadError as e:
                failed[n] = e
        for n, error in failed.items():
            if not found:
                raise error
            self.lose(n, str(error))
        return found

    def check(self, holders: Mapping[int, OpenFile]) -> None:
        """Look at one file in each folder. Who has it no more as it was is lost, where another has it: what was read
        from it was looked at then.

        Raises:
            ReadError, OSError: it was written to, and nobody else has it.
        """
        for n, file in holders.items():
            try:
                file.check()
            except (ReadError, OSError) as e:
                if all(self.all[m].lost is not None for m in holders if m != n):
                    raise
                file.read = False
                self.lose(n, str(e))

    def lose(self, n: int, why: str) -> None:
        """Do not read from one any more where others have the same; the last one that is left stays."""
        replica = self.all[n]
        with self._lock:
            left = [str(r.folder) for r in self.all if r.lost is None and r is not replica]
            if replica.lost is not None or not left:
                return
            replica.lost = why
        self.note(f"{replica.folder} is no longer read: {why}; what it had is read from {', '.join(left)}")

    def count(self, n: int, nbytes: int) -> None:
        """Count what was read from one."""
        with self._lock:
            self.all[n].nbytes += nbytes
