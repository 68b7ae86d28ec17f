"""What was asked for when mlx-lm was patched, as its functions find it when they are called."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from outcore.options import LoadOptions

from .shared_budget import SharedBudget


@dataclass(frozen=True, eq=False)
class PatchSettings:
    """Of one patch.

    Attributes:
        options: by which models are loaded; of ``model_config``, ``adapter_path`` and the like the call's count.
        generation: arguments of ``stream_generate`` where the caller gives none.
        budget: shared by all models that are loaded by this patch.
    """

    options: LoadOptions
    generation: Mapping[str, Any] = field(default_factory=dict)
    budget: SharedBudget = field(default_factory=SharedBudget)


class Applied:
    """The patches that are applied now; the one that was applied last counts."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._stack: list[PatchSettings] = []

    @property
    def current(self) -> PatchSettings | None:
        """The settings that count; None: mlx-lm is as it was."""
        with self.lock:
            return self._stack[-1] if self._stack else None

    def push(self, settings: PatchSettings) -> None:
        with self.lock:
            self._stack.append(settings)

    def drop(self, settings: PatchSettings | None) -> bool:
        """Drop one, or all. Returns whether the last one has gone."""
        with self.lock:
            gone = [s for s in self._stack if settings is None or s is settings]
            self._stack = [s for s in self._stack if s not in gone]
            return bool(gone) and not self._stack


applied = Applied()
"""This process's."""


def warn_of_defaults() -> None:
    """Tell that arguments which were set for all texts do not apply to several at once."""
    settings = applied.current
    if settings is not None and settings.generation:
        names = ", ".join(settings.generation)
        logging.getLogger("outcore").warning("%s: not for sequences that share sweeps, which keep all tokens", names)
