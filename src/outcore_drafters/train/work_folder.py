"""The folder of what a resumed training needs: settings, states and weights. One process at a time works in it."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
from filelock import lock_descriptor

from outcore.errors import UsageError
from outcore.machine.written import wrote
from outcore.text import printable

# Its name, in the drafter's folder.
WORK = "training"

# Bytes of an array's name, shape and place in a file, at most.
NAMED = 256

# What is in it: names, and patterns of them.
SETTINGS, STATES, PARTIAL = "settings.json", "states", ".partial"
WEIGHTS = ("best.*safetensors", "last.*safetensors")
OWN = (*WEIGHTS, f"{STATES}/states-*.safetensors", f"{STATES}/partial.safetensors", f"{SETTINGS}{PARTIAL}", SETTINGS)


class WorkFolder:
    """A training's folder.

    Args:
        path: of the folder, which need not be there yet.

    Attributes:
        written: bytes written in all runs of the training, also those of files that a kill interrupted.
        most: bytes that may be written.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._descriptor = path, -1
        self.written, self.most = 0, math.inf
        self._settings: dict[str, Any] = {}

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
        return sum(file.stat().st_size for file in self._files())

    def _files(self) -> list[Path]:
        return [file for pattern in OWN for file in self.path.glob(pattern)]

    @property
    def _unfinished(self) -> list[Path]:
        """Files that a kill interrupted."""
        return [file for file in self._files() if "partial" in file.name]

    @property
    def settings(self) -> dict[str, Any] | None:
        """The settings of a training that can be resumed here; None: there is none.

        Raises:
            UsageError: they cannot be read, so that nobody knows what its files were made of.
        """
        file = self.path / SETTINGS
        kept = set(self._files()) - {file, *self._unfinished}
        if not kept:
            return None
        try:
            found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            seconds = float(found.get("seconds", 0.0))
            found.pop("written", None)
            whole = {"count": int(found["count"]), "texts": int(found["texts"]), "inner": int(found.get("inner", 0))}
            if min(whole["count"], whole["texts"]) < 1 or whole["inner"] < 0:
                raise ValueError
            return {**found, **whole, "seconds": seconds}
        except (FileNotFoundError, ArithmeticError, AttributeError, ValueError, TypeError, KeyError):
            said = "missing, or not written by this version; remove the folder"
            raise UsageError(f"{printable(str(file))}: {said}") from None

    def begin(self, settings: dict[str, Any]) -> None:
        """Makes and locks the folder, and writes the settings.

        Raises:
            UsageError: another process trains in it.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        unfinished = list[Path]()
        if self._descriptor < 0:
            descriptor = os.open(self.path, os.O_RDONLY)
            if not lock_descriptor(descriptor, blocking=False):
                os.close(descriptor)
                raise UsageError(f"{printable(str(self.path))}: another process trains there; give another --output")
            self._descriptor = descriptor
            self.written, unfinished = self._written_before(), self._unfinished
        self._keep(settings)
        for file in unfinished:
            file.unlink(missing_ok=True)  # once counted

    def _written_before(self) -> int:
        """Returns bytes that earlier runs wrote."""
        try:
            kept = int(json.loads((self.path / SETTINGS).read_text(encoding="utf-8"))["written"])
        except (OSError, ArithmeticError, ValueError, KeyError, TypeError):
            return self.own_bytes  # begun by a version that did not count them
        return kept + sum(file.stat().st_size for file in self._unfinished)

    def _keep(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        partial = self.path / f"{SETTINGS}{PARTIAL}"
        partial.write_text(json.dumps(settings | {"written": self.written}), encoding="utf-8")
        self.written += partial.stat().st_size
        partial.replace(self.path / SETTINGS)

    def room(self, *arrays: dict[str, mx.array]) -> float:
        """Returns how many times files of ``arrays`` may still be written."""
        return (self.most - self.written) / sum(a.nbytes + NAMED for each in arrays for a in each.values())

    def write(self, file: Path, arrays: dict[str, mx.array], metadata: dict[str, str] | None = None) -> None:
        """Writes a safetensors file, whole or not at all, and counts its bytes."""
        partial = file.with_suffix(f"{PARTIAL}.safetensors")
        mx.save_safetensors(str(partial), arrays, metadata or {})
        nbytes = partial.stat().st_size
        self.written += nbytes
        self._keep(self._settings)  # before it has its name: counted twice after a kill here, rather than not at all
        wrote("training", nbytes)
        partial.replace(file)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def remove(self) -> None:
        """Removes the files of a training, and the folder if it holds nothing else."""
        for file in self._files():
            file.unlink(missing_ok=True)
        for folder in (self.states, self.path):
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()
