"""The seam to ``outcore_mirrors``: copies of a model's folder on other disks, which are read as well as it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from ..disk.reader import Reader
from ..errors import UsageError
from ..packages import modules
from .checkpoint import Checkpoint


class ReadFolder(Protocol):
    """A folder that is read from: ``nbytes`` so far. ``lost``: why it is not read any more; None: it is."""

    folder: Path
    nbytes: int
    lost: str | None


class Mirrors(Protocol):
    """A model's own folder and its copies, for as long as the model lives: one that was lost stays lost.

    Attributes:
        all: the own folder first.
        note: told, in any thread, when one is lost.
    """

    note: Callable[[str], None]

    @property
    def all(self) -> Sequence[ReadFolder]: ...

    def reader(self, files: Sequence[Path], **options: Any) -> Reader:
        """Reads files from every folder that has them; ``options`` as of ``FileReader``."""

    def compare(self, check: Callable[[Sequence[Path]], None], progress: Callable[[str, int, int], None]) -> None:
        """See that every byte of each copy is the model's; ``check`` looks at the disk of a copy's files first.

        Raises:
            StoreError: one is not (named).
        """

    def about(self) -> tuple[str, ...]:
        """What a user should know."""


def find_mirrors(named: Sequence[Path], checkpoint: Checkpoint) -> Mirrors | None:
    """The copies of a model in these folders; None: no folder was named.

    Raises:
        StoreError: one holds no copy of the model as it is now.
        UsageError: the package that reads copies is not there.
    """
    if not named:
        return None
    if (package := modules("mirrors").get("mirrors")) is None:
        what = "needs the package outcore_mirrors, which is not there; install outcore whole"
        raise UsageError(f"--mirror {named[0]}: {what}")
    return cast(Mirrors, package.find_mirrors(named, checkpoint))
