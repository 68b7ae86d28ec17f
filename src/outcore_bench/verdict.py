"""Finds the best row of a measured grid, and says so."""

from __future__ import annotations

from collections.abc import Sequence

from outcore.checks import parse_size
from outcore.sizes import format_size

from .document import BenchRow

TIE = 0.02
"""Rows whose times per token differ by no more than this share count as equally fast."""


def start(rows: Sequence[BenchRow]) -> BenchRow | None:
    """Returns, of the rows within ``TIE`` of the fastest, that with the least memory, then fewest threads and slots."""
    measured = [r for r in rows if r.error is None and r.speed.s_per_token is not None]
    limit = (1 + TIE) * min(map(_seconds, measured), default=0.0)
    fast = [r for r in measured if _seconds(r) <= limit]
    return min(fast, key=lambda r: (_memory(r), r.setting.threads or 0, r.setting.slots or 0), default=None)


def by_budget(rows: Sequence[BenchRow]) -> list[BenchRow]:
    budgets = sorted({_memory(r) for r in rows})
    found = (start([r for r in rows if _memory(r) == budget]) for budget in budgets)
    return [r for r in found if r is not None]


def sentences(rows: Sequence[BenchRow]) -> list[str]:
    lines, first = [], start(rows)
    if first is not None:
        peak = first.use.peak_memory_bytes
        best = f"Best: {first.label}: {1 / _seconds(first):.3g} tokens/s, {_seconds(first):.3g} s per token"
        best += f", peak {format_size(peak)}" if peak is not None else ""
        best += "; the machine was busy: measure again" if first.busy else ""
        same = sum(r is not first and r.error is None and _as_fast(r, first) for r in rows)
        lines.append(
            best + (f"; {same} more are as fast (within {100 * TIE:.0f} %, or their repeats overlap)" if same else "")
        )
    if errors := [r for r in rows if r.error is not None]:
        lines.append(f"No numbers: {len(errors)} of {len(rows)} rows; {errors[0].label}: {errors[0].error}")
    if busy := sum(r.busy for r in rows):
        lines.append(f"Note: {busy} of {len(rows)} rows ran while the machine was busy; do not quote their numbers")
    return lines


def place(row: BenchRow) -> tuple[int, str]:
    return _memory(row), row.label


def _memory(row: BenchRow) -> int:
    return parse_size(row.setting.memory) if row.setting.memory else 0


def _seconds(row: BenchRow) -> float:
    assert row.speed.s_per_token is not None
    return row.speed.s_per_token.median


def _as_fast(row: BenchRow, best: BenchRow) -> bool:
    a, b = row.speed.s_per_token, best.speed.s_per_token
    return a is not None and b is not None and (a.median <= (1 + TIE) * b.median or a.least <= b.most)
