"""The folder of what a resumed training needs: settings, states and weights. One process at a time works in it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from filelock import lock_descriptor

from outcore.errors import UsageError
from outcore.text import printable

# Its name, in the drafter's folder.
WORK = "training"

# What is in it: names, and patterns of them.
SETTINGS, STATES = "settings.json", "states"
OWN = (SETTINGS, "*.safetensors", f"{STATES}/*.safetensors")


class WorkFolder:
    """Args: path: of the folder, which need not be there yet."""

    def __init__(self, path: Path) -> None:
        self.path, self._descriptor = path, -1

    @property
    def states(self) -> Path:
        return self.path / STATES

    @property
    def free_bytes(self) -> int:
        """Bytes that are free on its disk."""
        return shutil.disk_usage(next(p for p in (self.path, *self.path.absolute().parents) if p.is_dir())).free

    @property
    def own_bytes(self) -> int:
        """Bytes of its files."""
        return sum(file.stat().st_size for file in self.path.rglob("*") if file.is_file()) if self.path.is_dir() else 0

    @property
    def settings(self) -> dict[str, Any] | None:
        """The settings of a training that can be resumed here; None: there is none.

        Raises:
            UsageError: they cannot be read.
        """
        file = self.path / SETTINGS
        kept = (f for pattern in OWN[1:] for f in self.path.glob(pattern) if "partial" not in f.name)
        if not file.exists() or not any(kept):
            return None
        try:
            found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            seconds = float(found.get("seconds", 0.0))
            return {**found, "count": int(found["count"]), "texts": int(found["texts"]), "seconds": seconds}
        except (ArithmeticError, AttributeError, ValueError, TypeError, KeyError):
            raise UsageError(f"{printable(str(file))}: not written by this version; remove the folder") from None

    def begin(self, settings: dict[str, Any]) -> None:
        """Makes and locks the folder, and writes the settings.

        Raises:
            UsageError: another process trains in it.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        if self._descriptor < 0:
            descriptor = os.open(self.path, os.O_RDONLY)
            if not lock_descriptor(descriptor, blocking=False):
                os.close(descriptor)
                raise UsageError(f"{printable(str(self.path))}: another process trains there; give another --output")
            self._descriptor = descriptor
        partial = self.path / f"{SETTINGS}.partial"
        partial.write_text(json.dumps(settings), encoding="utf-8")
        partial.replace(self.path / SETTINGS)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def remove(self) -> None:
        """Removes the files of a training, and the folder if it holds nothing else."""
        for pattern in OWN:
            for file in self.path.glob(pattern):
                file.unlink(missing_ok=True)
        for folder in (self.states, self.path):
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()
