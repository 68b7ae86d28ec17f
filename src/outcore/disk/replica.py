"""The folders that the same bytes are read from: a model's own, and mirrors of it on other disks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(eq=False)
class Replica:
    """A folder to read from.

    Attributes:
        folder: as people call it.
        copies: files of the model → its copies of them; None: it is the model's own folder.
        states: what tells each copy from what it was when it was compared (``state_of``).
        io, threads: as in ``FileReader``; None: as the reader's others.
        lost: why it is not read any more; None: it is.
        nbytes: bytes that were read from it.
    """

    folder: Path
    copies: Mapping[Path, Path] | None = None
    states: Mapping[Path, tuple[int, ...]] | None = None
    io: str | None = None
    threads: int | None = None
    lost: str | None = None
    nbytes: int = 0

    def copy_of(self, file: Path) -> Path | None:
        """Where it has a file of the model; None: nowhere."""
        return file if self.copies is None else self.copies.get(file)

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

    def __len__(self) -> int:
        return len(self.all)

    @property
    def mirrors(self) -> tuple[Replica, ...]:
        """All but the model's own folder."""
        return self.all[1:]

    def lose(self, n: int, why: str) -> None:
        """Do not read from one any more where others have the same; the last one that is left stays."""
        replica = self.all[n]
        with self._lock:
            left = [str(r.folder) for r in self.all if r.lost is None and r is not replica]
            if replica.lost is not None or not left:
                return
            replica.lost = why
        self.note(f"{replica.folder} is no longer read: {why}; what it had is read from {', '.join(left)}")

    def read(self, n: int, nbytes: int) -> None:
        """Count what was read from one."""
        with self._lock:
            self.all[n].nbytes += nbytes


def state_of(file: Path) -> tuple[int, ...]:
    """What tells a file from what it was a moment ago; of one that is not there, nothing."""
    try:
        found = file.stat()
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
