"""Speed against memory: a plan for each of several budgets, and the budget from which more memory buys little."""

from __future__ import annotations

from collections.abc import Sequence

from .joint_plan import Planning
from .machine_profile import Calibration
from .plan import Plan
from .planner import resident_budget

POINTS = 16
NEAR = 0.95
"""A budget is enough when it gives this share of the speed that all the memory there is would give."""

COMPUTING = 0.9
"""Where streaming gives this share of the speed that everything in memory does, the disk is not what is waited for:
handing units over takes some time too."""


def speed_curve(
    planning: Planning, calibration: Calibration, *, points: int = POINTS, also: Sequence[int] = ()
) -> list[Plan]:
    """Plans from the smallest budget that works to everything resident, evenly spaced.

    Args:
        planning: what plans are made of; with a number of resident layers asked for there is but one plan.
        also: budgets that shall be among them.
    """
    least = planning.smallest
    most = max(least, resident_budget(planning.largest))
    steps = [least + i * (most - least) // (points - 1) for i in range(points)]
    budgets = sorted({*steps, *(b for b in also if least <= b <= most)})
    return [planning.at(budget, calibration).plan for budget in budgets]


def knee(plans: Sequence[Plan], available: int) -> Plan | None:
    """Of the plans that fit into ``available`` bytes, the smallest that is about as fast as the fastest; None: none."""
    fitting = [p for p in plans if p.budget_bytes <= available]
    if not fitting:
        return None
    fastest = min(p.token_s for p in fitting)
    return next(p for p in fitting if p.token_s <= fastest / NEAR)


def computing_from(plans: Sequence[Plan]) -> Plan | None:
    """The smallest plan from which on computing is the limit: about as fast as with nothing streamed. None: the disk is
    the limit until nothing is, or what nothing streams is not among them."""
    if plans[-1].streams:
        return None
    slowest = plans[-1].token_s / COMPUTING
    first = next(i for i in range(len(plans)) if all(p.token_s <= slowest for p in plans[i:]))
    return plans[first] if plans[first].streams else None
