"""Other plans for a model that is running, or about to be loaded: with less in memory, or for a longer text."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..errors import BudgetError
from ..plan.machine_profile import Calibration
from ..plan.model_size import ModelSize
from ..plan.plan import Plan
from ..plan.planner import make_plan

if TYPE_CHECKING:
    from .session import Session


def another(
    session: Session,
    size: ModelSize,
    budget: int,
    *,
    for_context: bool = False,
    undrafted: bool = False,
    **options: Any,
) -> Plan:
    """A plan of its own for what the model is now; as ``make_plan``.

    Args:
        for_context: room is needed for a longer context, so keys and values may go to the disk. Where memory is
            short for another reason, they stay where they are.
        undrafted: as it would be if what drafts were given up.

    Raises:
        BudgetError: there is none for that budget.
    """
    drafting = None if undrafted else session.drafting
    stays = True if drafting is not None and drafting.holds_head else None
    size = size if for_context else replace(size, kv_disk="off")
    return _made(size, budget, session.plan.head_streamed, stays, session.residency.calibration, options)


def come_down(size: ModelSize, plan: Plan, room: int, calibration: Calibration) -> Plan:
    """Before anything is loaded: the plan, with fewer residents where there is no room for it. A budget is what may be
    used, and not always there to be used."""
    if plan.peak_bytes <= room:
        return plan
    size, options = replace(size, kv_disk="off"), {"prefill_step": plan.prefill_step}
    smaller = at_least(lambda n: _made(size, n, plan.head_streamed, None, calibration, options), room)
    return replace(smaller, budget_bytes=plan.budget_bytes)


def at_least(plan: Callable[[int], Plan], budget: int) -> Plan:
    """The plan for a budget, or for the smallest that there is one for.

    Raises:
        BudgetError: there is none.
    """
    try:
        return plan(budget)
    except BudgetError as e:
        if e.smallest is None:
            raise
        return plan(e.smallest)


def _made(
    size: ModelSize, budget: int, streamed: bool, stays: bool | None, calibration: Calibration, options: dict[str, Any]
) -> Plan:
    # A head that is streamed stays so: its arrays are gone.
    stays = False if streamed else stays
    if stays is None:  # it cannot come back, so it goes only where nothing else would fit
        with contextlib.suppress(BudgetError):
            return make_plan(size, budget, head_resident=True, calibration=calibration, **options)
    return make_plan(size, budget, head_resident=stays, calibration=calibration, **options)
