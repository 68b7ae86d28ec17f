"""The interface to ``outcore_mirrors``: copies of a model's folder on other disks that are read together with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from ..disk.reader import Reader
from ..errors import UsageError
from ..packages import modules
from .checkpoint import Checkpoint


class ReadFolder(Protocol):
    """A folder with weights. ``nbytes``: bytes read from it; ``lost``: why it is not read any more, or None."""

    folder: Path
    nbytes: int
    lost: str | None


class Mirrors(Protocol):
    """A model's own folder and its copies, for as long as the model lives.

    Attributes:
        all: the folders, the model's own first.
        note: called with a message, in any thread, when a folder can no longer be read.
    """

    note: Callable[[str], None]

    @property
    def all(self) -> Sequence[ReadFolder]: ...

    def reader(self, files: Sequence[Path], **options: Any) -> Reader: ...

    def compare(self, check: Callable[[Sequence[Path]], None], progress: Callable[[str, int, int], None]) -> None:
        """Check that every byte of each copy equals the model's. ``check`` is called with each copy's files first.

        Raises:
            StoreError: a copy differs; the message names file and byte.
        """

    def about(self) -> tuple[str, ...]: ...


def find_mirrors(named: Sequence[Path], checkpoint: Checkpoint) -> Mirrors | None:
    if not named:
        return None
    if (package := modules("mirrors").get("mirrors")) is None:
        what = "needs the package outcore_mirrors, which is missing; install outcore again"
        raise UsageError(f"--mirror {named[0]}: {what}")
    return cast(Mirrors, package.find_mirrors(named, checkpoint))
