"""What a measured grid says: its best point, if one is better than all others, and where speed falls off. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from outcore.sizes import format_size

from .matrix import Cell, GridPoint

TIE = 0.02
"""Share of the time per token within which points are equally good."""
FALL = 0.10
"""Share of the speed whose loss counts as falling off."""
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
class Verdict:
    """
    Attributes:
        equals: the point with the least time per token, and those that nothing tells from it: within ``TIE`` of it, or
            with repeats that overlap its own. Least memory first, then fewest threads, slots.
        start: of the points within ``TIE`` of the least time the first one in that order.
        by_budget: the same of each budget, smallest budget first.
        streamed_equals, streamed: as ``equals`` and ``start``, of the points that stream. None if none streams.
        falls: along the budgets from ``start``, along the other axes from ``streamed``.
    """

    equals: tuple[Cell, ...]
    start: Cell
    by_budget: tuple[Cell, ...]
    streamed_equals: tuple[Cell, ...]
    streamed: Cell | None
    falls: tuple[Fall, ...]

    @property
    def best(self) -> Cell | None:
        """The best point; None where others are equally fast."""
        return self.equals[0] if len(self.equals) == 1 else None


def verdict(cells: Sequence[Cell]) -> Verdict | None:
    """What the grid says; None where nothing was measured."""
    measured = sorted((c for c in cells if c.tps is not None), key=_cost)
    if not measured:
        return None
    start = _first(measured)
    streaming = [c for c in measured if not c.point.resident]
    streamed = _first(streaming) if streaming else None
    budgets = sorted({c.point.memory for c in measured})
    falls = _falls(start, "memory", cells)
    if streamed is not None:
        falls += [fall for axis in AXES[1:] for fall in _falls(streamed, axis, cells)]
    return Verdict(
        _equals(measured),
        start,
        tuple(_first([c for c in measured if c.point.memory == budget]) for budget in budgets),
        _equals(streaming),
        streamed,
        tuple(falls),
    )


def sentences(found: Verdict, cells: Sequence[Cell]) -> list[str]:
    """The verdict in words."""
    said = [_best("", found.equals, found.start)]
    if found.streamed is not None and found.streamed_equals != found.equals:
        said.append(_best(" that streams", found.streamed_equals, found.streamed))
    of_axis = {a: {getattr(c.point, a) for c in cells if a == "memory" or not c.point.resident} for a in AXES}
    axes = [axis for axis in AXES if len(of_axis[axis]) > 1]
    falls = [f for axis in axes for f in found.falls if f.axis == axis]
    steady = [axis for axis in axes if axis not in {f.axis for f in falls}]
    for fall in falls:
        lost = fall.why or f"{100 * fall.drop:.0f} % slower"
        said.append(f"Falls off: from {_value(fall.axis, fall.start)} to {_value(fall.axis, fall.at)}, {lost}")
    if steady:
        said.append(f"No fall of more than {100 * FALL:.0f} % along: {', '.join(steady)}")
    return said


def _best(that: str, equals: Sequence[Cell], start: Cell) -> str:
    peak = start.row.use.peak_memory_bytes if start.row is not None else None
    shown = f"{start.point.label}: {start.tps:.3g} tok/s, {start.s_per_token:.3g} s a token"
    shown += f", {format_size(peak)} at most" if peak is not None else ""
    shown += "; it met a busy machine: measure again" if start.busy else ""
    if len(equals) == 1:
        return f"Best{that}: {shown}"
    return (
        f"No best{that}: {len(equals)} points are equally fast (within {100 * TIE:.0f} %, or their repeats overlap); "
        f"of the fastest this takes least: {shown}"
    )


def _value(axis: str, value: int | str) -> str:
    if axis == "memory":
        return format_size(int(value))
    return str(value) if axis == "io" else f"{value} {axis if value != 1 else axis.removesuffix('s')}"


def _seconds(cell: Cell) -> float:
    assert cell.s_per_token is not None
    return cell.s_per_token


def _cost(cell: Cell) -> tuple[float, ...]:
    return cell.point.memory, cell.point.threads, cell.point.slots, _seconds(cell)


def _first(measured: Sequence[Cell]) -> Cell:
    limit = (1 + TIE) * min(map(_seconds, measured))
    return next(c for c in measured if _seconds(c) <= limit)


def _equals(measured: Sequence[Cell]) -> tuple[Cell, ...]:
    fastest = min(measured, key=_seconds, default=None)
    if fastest is None:
        return ()
    limit = (1 + TIE) * _seconds(fastest)
    return tuple(c for c in measured if _seconds(c) <= limit or _overlap(c, fastest))


def _overlap(one: Cell, other: Cell) -> bool:
    """Whether the repeats of two runs overlap, so that chance may tell them apart."""
    a, b = one.stat, other.stat
    return a is not None and b is not None and a.least <= b.most and b.least <= a.most


def _falls(start: Cell, axis: str, cells: Sequence[Cell]) -> list[Fall]:
    """At most one in each direction; every other way of reading, since those have no order."""

    def value(cell: Cell) -> Any:
        return getattr(cell.point, axis)

    others = sorted(_along(start, axis, cells), key=value)
    directions = [[c] for c in others]
    if axis != "io":
        lower, higher = ([c for c in others if (value(c) < value(start)) == below] for below in (True, False))
        directions = [lower[::-1], higher]
    falls = []
    for walk in directions:
        for cell in walk:
            drop = 1.0 if cell.tps is None else 1 - cell.tps * _seconds(start)
            if drop > FALL and not _overlap(cell, start):
                falls.append(Fall(axis, value(start), value(cell), drop, cell.why))
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
        there = [c for p, c in known.items() if p.memory == budget]
        if start.point.resident:  # it has no setting of its own to keep
            found.append(min((c for c in there if c.tps is not None), key=_seconds, default=there[0]))
        else:
            wanted = (replace(start.point, memory=budget), GridPoint(budget))
            found += [known[p] for p in wanted if p in known][:1]
    return found
