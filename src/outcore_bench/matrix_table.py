"""A matrix for the terminal: the best setting of each budget, then the verdict in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console

from outcore.sizes import format_size

from .matrix import Cell
from .matrix_summary import GridSummary
from .table import show
from .verdict import AXES, DEFECT, FALL, TIE, Fall, Verdict, verdict

DRIFT = 0.2
"""Share by which the disk's rate may differ over the runs without being told."""


def show_matrix(summary: GridSummary, console: Console) -> None:
    """Print a row for each budget, and the verdict."""
    document, cells = summary.compared()
    found = verdict(cells)
    if found is not None:
        # Shortened so that most rows take one line.
        rows = [replace(c.row, label=_short(c)) for c in found.by_budget if c.row is not None]
        show(replace(document, rows=rows), console)
        console.print()
    for line in lines(summary, found):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def lines(summary: GridSummary, found: Verdict | None) -> list[str]:
    """The verdict, a sentence a line."""
    said = _verdict(found, summary.cells) if found is not None else []
    return [*said, *_states(summary)]


def _verdict(found: Verdict, cells: Sequence[Cell]) -> list[str]:
    said = [_best("", found.equals, found.start)]
    if found.streamed is not None and found.streamed_equals != found.equals:
        said.append(_best(" that streams", found.streamed_equals, found.streamed))
    of_axis = {a: {getattr(c.point, a) for c in cells if a == "memory" or not c.point.resident} for a in AXES}
    axes = [axis for axis in AXES if len(of_axis[axis]) > 1]
    falls = [f for axis in axes for f in found.falls if f.axis == axis]
    steady = [axis for axis in axes if axis not in {f.axis for f in falls}]
    said += [f"Falls off: {_fall(f)}" for f in falls]
    if steady:
        said.append(f"No fall of more than {100 * FALL:.0f} % along: {', '.join(steady)}")
    if found.steepest is not None:
        s = found.steepest
        said.append(
            f"Steepest: from {format_size(s.larger)} down to {format_size(s.smaller)} "
            f"{_percent(s.lost)} of the speed is lost"
        )
    for d in found.defects:
        doubts = ["their repeats overlap"] * d.overlap + ["one of them met a busy machine"] * d.busy
        chance = f"; {' and '.join(doubts)}, so that it may be chance: measure again" if doubts else ""
        said.append(
            f"Defect: {format_size(d.larger)} runs {_percent(1 - d.larger_tps / d.smaller_tps)} slower than "
            f"{format_size(d.smaller)}, more than {100 * DEFECT:.0f} %{chance}"
        )
    return said


def _best(that: str, equals: Sequence[Cell], start: Cell) -> str:
    if len(equals) == 1:
        return f"Best{that}: {_shown(start)}"
    return (
        f"No best{that}: {len(equals)} points are equally fast (within {100 * TIE:.0f} %, or their repeats overlap); "
        f"of the fastest this takes least: {_shown(start)}"
    )


def _states(summary: GridSummary) -> list[str]:
    said = []
    states = [c.state for c in summary.cells]
    if unfit := [c for c in summary.cells if c.state == "unfit"]:
        said.append(
            f"Not run: {len(unfit)} of {len(states)} points do not fit; {unfit[0].point.label}: {unfit[0].unfit}"
        )
    failures: dict[str, list[Cell]] = {}
    for cell in summary.cells:
        if cell.state == "failed" and cell.row is not None:
            failures.setdefault(str(cell.row.error), []).append(cell)
    for error, cells in failures.items():
        others = f" and {len(cells) - 1} more" if len(cells) > 1 else ""
        said.append(f"Failed: {cells[0].point.label}{others}: {error}")
    busy = sum(c.busy for c in summary.cells)
    if busy:
        said.append(
            f"Note: {busy} of {len(states) - states.count('unfit')} runs met a busy machine; quote no number of them"
        )
    rates = [c.row.disk_gbps for c in summary.cells if c.row is not None and c.row.disk_gbps and c.row.cache != "warm"]
    if rates and min(rates) < (1 - DRIFT) * max(rates):
        said.append(f"Note: the disk alone gave between {min(rates):.2f} and {max(rates):.2f} GB/s over the runs")
    return said + [f"Note: {note}" for note in summary.notes]


def _short(cell: Cell) -> str:
    p = cell.point
    return p.setting if p.resident else f"{p.io}, {p.slots} slots, {p.threads} thr."


def _shown(cell: Cell) -> str:
    assert cell.row is not None and cell.s_per_token is not None and cell.tps is not None
    peak = cell.row.peak_memory_bytes
    at_most = f", {format_size(peak)} at most" if peak is not None else ""
    busy = "; it met a busy machine: measure again" if cell.busy else ""
    return f"{cell.point.label}: {cell.tps:.3g} tok/s, {cell.s_per_token:.3g} s a token{at_most}{busy}"


def _fall(fall: Fall) -> str:
    def name(value: int | str) -> str:
        if fall.axis == "memory":
            return format_size(int(value))
        if fall.axis == "io":
            return str(value)
        return f"{value} {fall.axis if value != 1 else fall.axis.removesuffix('s')}"

    what = f"from {name(fall.start)} to {name(fall.at)}"
    return f"{what}, {fall.why}" if fall.why is not None else f"{what}, {_percent(fall.drop)} slower"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
