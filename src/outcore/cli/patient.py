"""What the checks of ``outcore doctor`` look at, and what each finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..disk.disk_probe import DiskProbe, probe_disk

REPORT = "please report this page"

Check = Callable[["Patient"], "Finding"]


@dataclass(frozen=True)
class Finding:
    """What one check found.

    Attributes:
        ok: None: nothing is wrong, but something is worth knowing.
        advice: what to do about it.
    """

    name: str
    ok: bool | None
    found: str
    advice: str = ""


@dataclass
class Patient:
    """What checks look at.

    Attributes:
        file: that is read: the largest of the model's, or a scratch file.
        model: a folder; None: none was given.
        disk: a folder on the file's disk, where its own path does not tell.
        facts: numbers for a program, by name.
    """

    file: Path
    model: Path | None = None
    disk: Path | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    _probe: DiskProbe | None = None

    @property
    def probe(self) -> DiskProbe:
        """What the disk does; looked at once."""
        if self._probe is None:
            self._probe = probe_disk(self.file)
        return self._probe
