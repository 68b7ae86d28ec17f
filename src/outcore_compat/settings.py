"""What was asked for when mlx-lm was patched, as its functions find it when they are called."""

from __future__ import annotations

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


applied: list[PatchSettings] = []
"""The patches of this process; the one that was applied last counts. Changed under ``applied_lock``."""
applied_lock = threading.RLock()


def current_settings() -> PatchSettings | None:
    """The settings that count; None: mlx-lm is as it was."""
    with applied_lock:
        return applied[-1] if applied else None
