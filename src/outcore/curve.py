"""Speed against memory: a plan for each of several budgets, and the budget from which more memory buys little."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .calibration import Calibration
from .errors import BudgetError
from .plan import ModelSize, Plan
from .planner import make_plan, resident_budget

POINTS = 16
NEAR = 0.95
"""A budget is enough when it gives this share of the speed that all the memory there is would give."""


def speed_curve(
    size: ModelSize, calibration: Calibration, *, points: int = POINTS, also: Sequence[int] = (), **options: Any
) -> list[Plan]:
    """Plans from the smallest budget that works to everything resident, evenly spaced.

    Args:
        also: budgets that shall be among them.
        options: as in ``make_plan``; with a number of resident layers asked for there is but one plan.
    """
    try:
        least = make_plan(size, 2**62, calibration=calibration, **options).smallest_budget_bytes
    except BudgetError as e:
        if e.smallest is None:
            raise
        least = e.smallest
    most = max(least, resident_budget(size))
    steps = [least + i * (most - least) // (points - 1) for i in range(points)]
    budgets = sorted({*steps, *(b for b in also if least <= b <= most)})
    return [make_plan(size, budget, calibration=calibration, **options) for budget in budgets]


def knee(plans: Sequence[Plan], available: int) -> Plan | None:
    """Of the plans that fit into ``available`` bytes, the smallest that is about as fast as the fastest; None: none."""
    fitting = [p for p in plans if p.budget_bytes <= available]
    if not fitting:
        return None
    fastest = min(p.token_s for p in fitting)
    return next(p for p in fitting if p.token_s <= fastest / NEAR)
