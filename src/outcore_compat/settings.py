"""The settings of applied patches, and the budget that all models of one patch share: a program may load a second model
after the first one got the whole budget."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.nn as nn

from outcore.decode.budget import asked_budget
from outcore.decode.preparation import prepare
from outcore.engine.session import Session
from outcore.errors import BudgetError
from outcore.options import LoadOptions
from outcore.plan.joint_plan import NONE
from outcore.plan.planner import resident_budget
from outcore.sizes import format_size

# Loads a model with these options; returns a tuple whose first item is the model.
Load = Callable[[LoadOptions], tuple[Any, ...]]


class SharedBudget:
    """Models that share a budget. The first one gets all of it. Each further one gets what it needs to be all in
    memory, or as much of that as the others can do without."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._models: list[weakref.ref[nn.Module]] = []
        self._total = 0

    @property
    def sessions(self) -> list[Session]:
        found = [model.outcore for ref in list(self._models) if (model := ref()) is not None]
        return [s for s in found if not s.closed]

    def load(self, folder: Path, options: LoadOptions, load: Load) -> tuple[Any, ...]:
        """Loads one more model. Raises ``BudgetError`` if there is no room next to the others, which then keep what
        they had."""
        with self._lock:
            if not options.asked:
                # Without --memory the budget is what is free, which excludes the other models.
                return self._kept(load(options))
            if self.sessions:
                gc.collect()  # frees models that only reference cycles keep alive
            others = self.sessions
            if not others:
                self._total = asked_budget(options.memory)
                return self._kept(load(replace(options, memory=self._total)))
            planned = prepare(folder, replace(options, memory=self._total, draft=NONE))
            least, before = planned.plan.smallest_budget_bytes, [s.plan.budget_bytes for s in others]
            try:
                for session in others:
                    self._lower(session, resident_budget(planned.profile.size) - self._free(others))
                free = self._free(others)
                if free < least:
                    raise BudgetError(
                        f"{len(others) + 1} models share {format_size(self._total)}, of which those that are loaded "
                        f"leave {format_size(free)}; {folder.name} needs {format_size(least, round_up=True)} at "
                        "least: give more memory",
                        self._total + least - free,
                    )
                return self._kept(load(replace(options, memory=free)))
            except BaseException:
                for session, budget in zip(others, before, strict=True):
                    session.allow(budget)
                raise

    def _free(self, sessions: Sequence[Session]) -> int:
        return max(0, self._total - sum(s.plan.budget_bytes for s in sessions))

    def _lower(self, session: Session, nbytes: int) -> None:
        """Takes ``nbytes`` from a model's budget, down to its smallest. A running long text keeps its room."""
        if nbytes > 0:
            with contextlib.suppress(BudgetError):
                session.allow(max(session.plan.smallest_budget_bytes, session.plan.budget_bytes - nbytes))

    def _kept(self, found: tuple[Any, ...]) -> tuple[Any, ...]:
        self._models = [ref for ref in self._models if ref() is not None]
        self._models.append(weakref.ref(found[0]))
        return found


@dataclass(frozen=True, eq=False)
class PatchSettings:
    """The settings of one patch.

    Attributes:
        options: for loading models; a call's own ``model_config``, ``adapter_path`` and the like take precedence.
        generation: arguments of ``stream_generate`` that the caller does not give.
        budget: shared by all models that this patch loads.
    """

    options: LoadOptions
    generation: Mapping[str, Any] = field(default_factory=dict)
    budget: SharedBudget = field(default_factory=SharedBudget)


# The patches of this process; the last one counts. Changed under ``applied_lock``.
applied: list[PatchSettings] = []
applied_lock = threading.RLock()


def current_settings() -> PatchSettings | None:
    with applied_lock:
        return applied[-1] if applied else None
