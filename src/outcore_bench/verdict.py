"""What a measured grid says: its best point, if one is better than all others, where speed falls off, and budgets that
should not be slower. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from .matrix import Cell, GridPoint

TIE = 0.02
"""Share of the time per token within which points are equally good."""
FALL = 0.10
"""Share of the speed whose loss counts as falling off."""
DEFECT = 0.03
"""Share of the speed by which a larger budget may be slower than a smaller one before it counts as a defect."""
AXES = ("memory", "io", "slots", "threads")


@dataclass(frozen=True)
class Fall:
    """The first value along an axis, away from ``start``, at which more than ``FALL`` of the speed there is lost, and
    not perhaps by chance: the repeats do not overlap.

    Attributes:
        drop: lost share of the speed; 1 where nothing ran.
        why: nothing ran: it does not fit, or failed.
    """

    axis: str
    start: int | str
    at: int | str
    drop: float
    why: str | None = None


@dataclass(frozen=True)
class BudgetStep:
    """Two budgets, bytes, and the most tokens per second that each gave.

    ``overlap``: the repeats of the two runs overlap; ``busy``: one of them met a busy machine. Then the difference may
    be chance.
    """

    larger: int
    smaller: int
    larger_tps: float
    smaller_tps: float
    overlap: bool
    busy: bool

    @property
    def lost(self) -> float:
        """Share of the larger budget's speed that the smaller one loses; negative where it is faster."""
        return 1 - self.smaller_tps / self.larger_tps


@dataclass(frozen=True)
class Verdict:
    """
    Attributes:
        equals: the point with the least time per token, and those that nothing tells from it: within ``TIE`` of it, or
            with repeats that overlap its own. Least memory first, then fewest threads, slots.
        start: of the points within ``TIE`` of the least time the first one in that order.
        by_budget: the same of each budget, smallest budget first.
        streamed_equals, streamed: as ``equals`` and ``start``, of the points that stream. None if none streams.
        falls: along the budgets from ``start``, along the other axes from ``streamed``.
        steepest: neighbouring budgets between which most speed is lost; None where none is.
        defects: budgets whose best is slower by more than ``DEFECT`` than a smaller one's.
    """

    equals: tuple[Cell, ...]
    start: Cell
    by_budget: tuple[Cell, ...]
    streamed_equals: tuple[Cell, ...]
    streamed: Cell | None
    falls: tuple[Fall, ...]
    steepest: BudgetStep | None
    defects: tuple[BudgetStep, ...]

    @property
    def best(self) -> Cell | None:
        """The best point; None where others are equally fast."""
        return self.equals[0] if len(self.equals) == 1 else None


def verdict(cells: Sequence[Cell]) -> Verdict | None:
    """What the grid says; None where nothing was measured."""
    measured = [c for c in cells if c.tps is not None]
    if not measured:
        return None
    start = _least(measured)
    streaming = [c for c in measured if not c.point.resident]
    streamed = _least(streaming) if streaming else None
    budgets = sorted({c.point.memory for c in measured})
    of_budget = {b: [c for c in measured if c.point.memory == b] for b in budgets}
    fastest = [min(of_budget[b], key=_seconds) for b in budgets]
    steps = [_step(larger, smaller) for smaller, larger in pairwise(fastest)]
    steepest = max(steps, key=lambda s: s.lost, default=None)
    defects = []
    for i, cell in enumerate(fastest[1:], start=1):
        rival = min(fastest[:i], key=_seconds)
        if _tps(cell) < (1 - DEFECT) * _tps(rival):
            defects.append(_step(cell, rival))
    falls = _falls(start, "memory", cells)
    if streamed is not None:
        falls += [fall for axis in AXES[1:] for fall in _falls(streamed, axis, cells)]
    return Verdict(
        _equals(measured),
        start,
        tuple(_least(of_budget[b]) for b in budgets),
        _equals(streaming),
        streamed,
        tuple(falls),
        steepest if steepest is not None and steepest.lost > 0 else None,
        tuple(defects),
    )


def _seconds(cell: Cell) -> float:
    assert cell.s_per_token is not None
    return cell.s_per_token


def _tps(cell: Cell) -> float:
    return 1 / _seconds(cell)


def _least(measured: Sequence[Cell]) -> Cell:
    limit = (1 + TIE) * min(map(_seconds, measured))
    return min((c for c in measured if _seconds(c) <= limit), key=_cost)


def _equals(measured: Sequence[Cell]) -> tuple[Cell, ...]:
    if not measured:
        return ()
    fastest = min(measured, key=_seconds)
    limit = (1 + TIE) * _seconds(fastest)
    return tuple(sorted((c for c in measured if _seconds(c) <= limit or _overlap(c, fastest)), key=_cost))


def _cost(cell: Cell) -> tuple[float, ...]:
    return cell.point.memory, cell.point.threads, cell.point.slots, _seconds(cell)


def _overlap(one: Cell, other: Cell) -> bool:
    """Whether the repeats of two runs overlap, so that chance may tell them apart."""
    a, b = one.row, other.row
    assert a is not None and b is not None and a.s_per_token is not None and b.s_per_token is not None
    return a.s_per_token.least <= b.s_per_token.most and b.s_per_token.least <= a.s_per_token.most


def _step(larger: Cell, smaller: Cell) -> BudgetStep:
    overlap, busy = _overlap(larger, smaller), larger.busy or smaller.busy
    return BudgetStep(larger.point.memory, smaller.point.memory, _tps(larger), _tps(smaller), overlap, busy)


def _falls(start: Cell, axis: str, cells: Sequence[Cell]) -> list[Fall]:
    """At most one in each direction; every other way of reading, since those have no order."""
    value: Callable[[GridPoint], Any] = lambda p: getattr(p, axis)  # noqa: E731
    here = value(start.point)
    others = _along(start, axis, cells)
    if axis == "io":
        directions = [[c] for c in others]
    else:
        lower = sorted((c for c in others if value(c.point) < here), key=lambda c: value(c.point), reverse=True)
        directions = [lower, sorted((c for c in others if value(c.point) > here), key=lambda c: value(c.point))]
    falls = []
    for walk in directions:
        for cell in walk:
            drop = 1 - cell.tps / _tps(start) if cell.tps is not None else 1.0
            if drop > FALL and not (cell.tps is not None and _overlap(cell, start)):
                falls.append(Fall(axis, here, value(cell.point), drop, cell.why))
                break
    return falls


def _along(start: Cell, axis: str, cells: Sequence[Cell]) -> list[Cell]:
    """The cells along an axis, with everything else as it is at ``start``; those not run yet are left out."""
    known = {c.point: c for c in cells if c.state != "missing"}
    if axis != "memory":
        same = {p: replace(p, **{axis: getattr(start.point, axis)}) for p in known if not p.resident}
        return [known[p] for p, back in same.items() if back == start.point and p != start.point]
    found = []
    for budget in sorted({p.memory for p in known} - {start.point.memory}):
        same_setting, resident = known.get(replace(start.point, memory=budget)), known.get(GridPoint(budget))
        if start.point.resident:  # it has no setting of its own to keep
            there = [c for c in known.values() if c.point.memory == budget]
            ran = [c for c in there if c.tps is not None]
            found.append(min(ran, key=_seconds) if ran else there[0])
        elif same_setting or resident:
            found.append(same_setting or known[GridPoint(budget)])
    return found
