"""What a measured grid says: its best point, if one is better than all others. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from outcore.checks import parse_size
from outcore.sizes import format_size

from .document import BenchRow

TIE = 0.02
"""Share of the time per token within which points are equally good."""


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


WHOLE = "all resident"


def point(row: BenchRow) -> GridPoint:
    """Where a row stands."""
    setting, memory = row.setting, parse_size(row.setting.memory or "")
    if setting.io in (None, "none"):
        return GridPoint(memory)
    return GridPoint(memory, str(setting.io), setting.slots or 0, setting.threads or 0)


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


def sentences(rows: Sequence[BenchRow]) -> list[str]:
    """Which is best, of all and of those that stream, and what has no numbers: a sentence a line."""
    streaming = [r for r in rows if point(r).io]
    said = _best("", rows)
    if equals(streaming) != equals(rows):
        said += _best(" that streams", streaming)
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


def _seconds(row: BenchRow) -> float:
    assert row.speed.s_per_token is not None
    return row.speed.s_per_token.median


def _measured(rows: Sequence[BenchRow]) -> list[BenchRow]:
    """Those with a speed, the one that takes least first."""
    measured = [(point(r), r) for r in rows if r.error is None and r.speed.s_per_token is not None]
    return [r for _, r in sorted(measured, key=lambda each: (each[0].memory, each[0].threads, each[0].slots))]


def _overlap(one: BenchRow, other: BenchRow) -> bool:
    """Whether the repeats of two runs overlap, so that chance may tell them apart."""
    a, b = one.speed.s_per_token, other.speed.s_per_token
    return a is not None and b is not None and a.least <= b.most and b.least <= a.most
