"""Plans with other layers resident: of a model that runs, and which layers those are."""

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
    """The plan with other layers resident, the ring as it is; for a model that may have grown."""
    made = _replanned(size, plan, resident)
    if plan.pools and size.on_demand is not None:
        return size.on_demand.with_pools(size, made, plan.pools, calibration)
    return predict(size, made, calibration)


def replanned_bytes(size: ModelSize, plan: Plan, resident: Iterable[int]) -> int:
    """The peak of ``replan``'s plan, without simulating what it takes."""
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
    """``count`` of these layers, as evenly spread among them as whole numbers allow."""
    return [layers[i] for i in spread(min(count, len(layers)), len(layers))]


def farthest(layers: Sequence[int], others: Sequence[int], count: int, of: int) -> list[int]:
    """``count`` of these layers, one after the other the one that is farthest from ``others`` and those before it.

    Sweeps follow each other: the first of ``of`` layers comes after the last.
    """
    there, left, found = list(others), list(layers), []
    for _ in range(min(count, len(left))):
        best = max(left, key=lambda i: min((min(abs(i - j), of - abs(i - j)) for j in there), default=of))
        left.remove(best)
        there.append(best)
        found.append(best)
    return sorted(found)
