"""What a measured grid says: its best point, and how many are as fast. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from outcore.checks import parse_size
from outcore.sizes import format_size

from .document import BenchRow

TIE = 0.02
"""Share of the time per token within which points are equally good."""


def start(rows: Sequence[BenchRow]) -> BenchRow | None:
    """Of the rows within ``TIE`` of the least time the one that takes least memory, then fewest threads, slots; None
    where nothing was measured."""
    measured = [r for r in rows if r.error is None and r.speed.s_per_token is not None]
    limit = (1 + TIE) * min(map(_seconds, measured), default=0.0)
    fast = [r for r in measured if _seconds(r) <= limit]
    return min(fast, key=lambda r: (_memory(r), r.setting.threads or 0, r.setting.slots or 0), default=None)


def by_budget(rows: Sequence[BenchRow]) -> list[BenchRow]:
    """The same of each budget, smallest budget first."""
    budgets = sorted({_memory(r) for r in rows})
    found = (start([r for r in rows if _memory(r) == budget]) for budget in budgets)
    return [r for r in found if r is not None]


def sentences(rows: Sequence[BenchRow]) -> list[str]:
    """Which is best, and what has no numbers: a sentence a line."""
    said, first = [], start(rows)
    if first is not None:
        peak = first.use.peak_memory_bytes
        shown = f"Best: {first.label}: {1 / _seconds(first):.3g} tok/s, {_seconds(first):.3g} s a token"
        shown += f", {format_size(peak)} at most" if peak is not None else ""
        shown += "; it met a busy machine: measure again" if first.busy else ""
        same = sum(r is not first and r.error is None and _as_fast(r, first) for r in rows)
        said.append(shown + (f"; as fast, within {100 * TIE:.0f} % or by its repeats: {same} more" if same else ""))
    if errors := [r for r in rows if r.error is not None]:
        said.append(f"No numbers: {len(errors)} of {len(rows)} points; {errors[0].label}: {errors[0].error}")
    if busy := sum(r.busy for r in rows):
        said.append(f"Note: {busy} of {len(rows)} points met a busy machine; quote no number of them")
    return said


def place(row: BenchRow) -> tuple[int, str]:
    """Where a row stands among the others of its grid."""
    return _memory(row), row.label


def _memory(row: BenchRow) -> int:
    return parse_size(row.setting.memory) if row.setting.memory else 0


def _seconds(row: BenchRow) -> float:
    assert row.speed.s_per_token is not None
    return row.speed.s_per_token.median


def _as_fast(row: BenchRow, best: BenchRow) -> bool:
    """Whether nothing tells a row from the best: it is within ``TIE``, or their repeats overlap."""
    a, b = row.speed.s_per_token, best.speed.s_per_token
    return a is not None and b is not None and (a.median <= (1 + TIE) * b.median or a.least <= b.most)
