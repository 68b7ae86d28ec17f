"""Plans for a running model with other layers resident, and the choice of those layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from .candidate import Candidate, Candidates
from .machine_profile import Calibration
from .model_size import ModelSize
from .partition import spread
from .plan import Plan
from .prediction import predict


def replan(size: ModelSize, plan: Plan, resident: Iterable[int], calibration: Calibration) -> Plan:
    """Returns the plan with other resident layers and the same ring, for a model that may have grown."""
    made = _replanned(size, plan, resident)
    if plan.pools and size.on_demand is not None:
        return size.on_demand.with_pools(size, made, plan.pools, calibration)
    return predict(size, made, calibration)


def replanned_bytes(size: ModelSize, plan: Plan, resident: Iterable[int]) -> int:
    """Returns the peak of ``replan``'s plan without predicting its seconds."""
    return _replanned(size, plan, resident).peak_bytes


def _replanned(size: ModelSize, plan: Plan, resident: Iterable[int]) -> Plan:
    stay = frozenset(resident)
    kept = tuple((i, pieces) for i, pieces in plan.kept if i not in stay)
    candidate = Candidate(
        Candidates(size), stay, plan.head_streamed, plan.prefill_step, plan.slots, plan.unit_bytes, kept
    )
    bare = replace(candidate.bare, unit_bytes=plan.unit_bytes) if plan.slots else candidate.bare
    return replace(
        bare,
        budget_bytes=plan.budget_bytes,
        smallest_budget_bytes=plan.smallest_budget_bytes,
        pools=plan.pools,
        pool_bytes=plan.pool_bytes,
        experts=plan.experts,
    )


def thin(layers: Sequence[int], count: int) -> list[int]:
    """Returns ``count`` of these layers, evenly spread."""
    return [layers[i] for i in spread(min(count, len(layers)), len(layers))]


def farthest(layers: Sequence[int], others: Sequence[int], count: int, of: int) -> list[int]:
    """Picks ``count`` layers one by one, each the farthest from ``others`` and those picked before.

    Distance wraps around: after the last of ``of`` layers comes the first.
    """
    there, left, found = list(others), list(layers), []
    for _ in range(min(count, len(left))):
        best = max(left, key=lambda i: min((min(abs(i - j), of - abs(i - j)) for j in there), default=of))
        left.remove(best)
        there.append(best)
        found.append(best)
    return sorted(found)
