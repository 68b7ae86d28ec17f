"""What a measured grid says: its best point, if one is better than all others, and where speed falls off. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from outcore.checks import parse_size
from outcore.sizes import format_size

from .document import BenchRow

TIE = 0.02
"""Share of the time per token within which points are equally good."""
FALL = 0.10
"""Share of the speed whose loss counts as falling off."""


class GridPoint(NamedTuple):
    """A row's place in the grid. Where everything is resident nothing is read: no way, and no slots or threads."""

    memory: int
    io: str = ""
    slots: int = 0
    threads: int = 0

    @property
    def setting(self) -> str:
        """All but the budget, for people."""
        return f"{self.io}, {self.slots} slots, {self.threads} thread{'s' * (self.threads > 1)}" if self.io else WHOLE


AXES = GridPoint._fields
WHOLE = "all resident"


def point(row: BenchRow) -> GridPoint:
    """Where a row stands."""
    setting, memory = row.setting, parse_size(row.setting.memory or "")
    if setting.io in (None, "none"):
        return GridPoint(memory)
    return GridPoint(memory, str(setting.io), setting.slots or 0, setting.threads or 0)


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


def equals(rows: Sequence[BenchRow]) -> list[BenchRow]:
    """The row with the least time per token, and those that nothing tells from it: within ``TIE`` of it, or with
    repeats that overlap its own. Least memory first, then fewest threads, slots."""
    measured = _measured(rows)
    fastest = min(measured, key=_seconds, default=None)
    if fastest is None:
        return []
    return [r for r in measured if _seconds(r) <= (1 + TIE) * _seconds(fastest) or _overlap(r, fastest)]


def start(rows: Sequence[BenchRow]) -> BenchRow | None:
    """Of the rows within ``TIE`` of the least time the one that takes least; None where nothing was measured."""
    measured = _measured(rows)
    limit = (1 + TIE) * min(map(_seconds, measured), default=0.0)
    return next((r for r in measured if _seconds(r) <= limit), None)


def by_budget(rows: Sequence[BenchRow]) -> list[BenchRow]:
    """The same of each budget, smallest budget first."""
    budgets = sorted({point(r).memory for r in rows})
    found = (start([r for r in rows if point(r).memory == budget]) for budget in budgets)
    return [r for r in found if r is not None]


def falls(rows: Sequence[BenchRow]) -> list[Fall]:
    """Along the budgets from the fastest row, along the other axes from the fastest that streams."""
    found = []
    for axis in AXES:
        first = start(rows if axis == "memory" else _streaming(rows))
        found += _falls(first, axis, rows) if first is not None else []
    return found


def sentences(rows: Sequence[BenchRow]) -> list[str]:
    """All of it in words, and what was not run or failed: a sentence a line."""
    said = _best("", rows)
    if equals(streaming := _streaming(rows)) != equals(rows):
        said += _best(" that streams", streaming)
    found, steady = falls(rows), []
    for axis in AXES:
        if len({getattr(point(r), axis) for r in (rows if axis == "memory" else streaming)}) < 2:
            continue
        of_axis = [fall for fall in found if fall.axis == axis]
        steady += [axis] if not of_axis else []
        for fall in of_axis:
            lost = fall.why or f"{100 * fall.drop:.0f} % slower"
            said.append(f"Falls off: from {_value(axis, fall.start)} to {_value(axis, fall.at)}, {lost}")
    if said and steady:
        said.append(f"No fall of more than {100 * FALL:.0f} % along: {', '.join(steady)}")
    if errors := [r for r in rows if r.error is not None]:
        said.append(f"No numbers: {len(errors)} of {len(rows)} points; {errors[0].label}: {errors[0].error}")
    if busy := sum(r.busy for r in rows):
        said.append(f"Note: {busy} of {len(rows)} points met a busy machine; quote no number of them")
    return said


def _best(that: str, rows: Sequence[BenchRow]) -> list[str]:
    same, first = equals(rows), start(rows)
    if first is None:
        return []
    peak = first.use.peak_memory_bytes
    shown = f"{first.label}: {1 / _seconds(first):.3g} tok/s, {_seconds(first):.3g} s a token"
    shown += f", {format_size(peak)} at most" if peak is not None else ""
    shown += "; it met a busy machine: measure again" if first.busy else ""
    if len(same) == 1:
        return [f"Best{that}: {shown}"]
    return [
        f"No best{that}: {len(same)} points are equally fast (within {100 * TIE:.0f} %, or their repeats overlap); "
        f"of the fastest this takes least: {shown}"
    ]


def _value(axis: str, value: int | str) -> str:
    if axis == "memory":
        return format_size(int(value))
    return str(value) if axis == "io" else f"{value} {axis if value != 1 else axis.removesuffix('s')}"


def _seconds(row: BenchRow) -> float:
    assert row.speed.s_per_token is not None
    return row.speed.s_per_token.median


def _measured(rows: Sequence[BenchRow]) -> list[BenchRow]:
    """Those with a speed, the one that takes least first."""
    measured = [(point(r), r) for r in rows if r.error is None and r.speed.s_per_token is not None]
    return [r for _, r in sorted(measured, key=lambda each: (each[0].memory, each[0].threads, each[0].slots))]


def _streaming(rows: Sequence[BenchRow]) -> list[BenchRow]:
    return [r for r in rows if point(r).io]


def _overlap(one: BenchRow, other: BenchRow) -> bool:
    """Whether the repeats of two runs overlap, so that chance may tell them apart."""
    a, b = one.speed.s_per_token, other.speed.s_per_token
    return a is not None and b is not None and a.least <= b.most and b.least <= a.most


def _falls(first: BenchRow, axis: str, rows: Sequence[BenchRow]) -> list[Fall]:
    """At most one in each direction; every other way of reading, since those have no order."""
    along = _along(point(first), axis, rows)
    at = getattr(point(first), axis)
    others = [(value, along[value]) for value in sorted(along)]
    directions = [[other] for other in others]
    if axis != "io":
        directions = [[o for o in others[::-1] if o[0] < at], [o for o in others if o[0] > at]]
    found = []
    for walk in directions:
        for value, row in walk:
            drop = 1.0 if row.error is not None else 1 - _seconds(first) / _seconds(row)
            if drop > FALL and not _overlap(row, first):
                found.append(Fall(axis, at, value, drop, row.error))
                break
    return found


def _along(at: GridPoint, axis: str, rows: Sequence[BenchRow]) -> dict[int | str, BenchRow]:
    """The rows along an axis by their values there, with everything else as it is at this point."""
    known = {point(r): r for r in rows}
    if axis != "memory":
        return {
            getattr(p, axis): row
            for p, row in known.items()
            if p.io and p != at and p._replace(**{axis: getattr(at, axis)}) == at
        }
    found: dict[int | str, BenchRow] = {}
    for budget in {p.memory for p in known} - {at.memory}:
        if at.io:
            there = [known[p] for p in (at._replace(memory=budget), GridPoint(budget)) if p in known]
        else:  # it has no setting of its own to keep
            there = _measured([r for p, r in known.items() if p.memory == budget])
            there = sorted(there, key=_seconds) or [r for p, r in known.items() if p.memory == budget]
        if there:
            found[budget] = there[0]
    return found
