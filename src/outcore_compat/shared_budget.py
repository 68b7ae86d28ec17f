"""One budget for several models: a program may load a second one beside the first, which took all of it."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.nn as nn

from outcore.decode.budget import asked_budget
from outcore.decode.preparation import prepare
from outcore.engine.engine import State
from outcore.engine.session import Session
from outcore.errors import BudgetError
from outcore.options import LoadOptions
from outcore.plan.draft_cost import NONE
from outcore.plan.planner import resident_budget
from outcore.sizes import format_size

Load = Callable[[LoadOptions], tuple[Any, ...]]
"""Loads a model by these options; the model comes first in what it returns."""


class SharedBudget:
    """The models that share a budget. The first gets all of it; each further one what it takes to be in memory as a
    whole, or as much of that as those before it can do without."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._models: list[weakref.ref[nn.Module]] = []
        self._total = 0

    @property
    def sessions(self) -> list[Session]:
        """Of the models that are still there."""
        found = [model.outcore for ref in list(self._models) if (model := ref()) is not None]
        return [s for s in found if s.state is not State.CLOSED]

    def load(self, folder: Path, options: LoadOptions, load: Load) -> tuple[Any, ...]:
        """Load one more model.

        Raises:
            BudgetError: there is no room for it beside the others, which keep what they had.
        """
        with self._lock:
            if not options.asked:
                # Made of what is free, of which the others are no part.
                return self._kept(load(options))
            if self.sessions:
                gc.collect()  # a model that nobody has any more may be there until then
            others = self.sessions
            if not others:
                self._total = asked_budget(options.memory)
                return self._kept(load(replace(options, memory=self._total)))
            free = max(0, self._total - sum(s.plan.budget_bytes for s in others))
            shared = f"{len(others) + 1} models share {format_size(self._total)}"
            planned = prepare(folder, replace(options, memory=self._total, draft=NONE))
            least = planned.plan.smallest_budget_bytes
            with _making_room(others, resident_budget(planned.profile.size) - free) as freed:
                if free + freed < least:
                    raise BudgetError(
                        f"{shared}, of which those that are loaded leave {format_size(free + freed)}; "
                        f"{folder.name} needs {format_size(least, round_up=True)} at least: give more memory",
                        self._total + least - free - freed,
                    )
                return self._kept(load(replace(options, memory=free + freed)))

    def _kept(self, found: tuple[Any, ...]) -> tuple[Any, ...]:
        self._models = [ref for ref in self._models if ref() is not None]
        self._models.append(weakref.ref(found[0]))
        return found


def _lower(session: Session, budget: int, wanted: int) -> None:
    """Within that budget from now on, or what comes nearest: a longer text than was planned for may need more."""
    try:
        session.allow(wanted)
    except BudgetError as e:
        if e.smallest is not None and wanted < e.smallest < budget:
            with contextlib.suppress(BudgetError):
                session.allow(e.smallest)


@contextlib.contextmanager
def _making_room(sessions: Sequence[Session], nbytes: int) -> Iterator[int]:
    """Have these models do with ``nbytes`` less, or what they can do without; with all of it again after an error."""
    before = [s.plan.budget_bytes for s in sessions]
    freed = 0
    try:
        for s, had in zip(sessions, before, strict=True):
            if freed < nbytes:
                _lower(s, had, max(s.plan.smallest_budget_bytes, had - (nbytes - freed)))
                freed += had - s.plan.budget_bytes
        yield freed
    except BaseException:
        for s, budget in zip(sessions, before, strict=True):
            s.allow(budget)
        raise
