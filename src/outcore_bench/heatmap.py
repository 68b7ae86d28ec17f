"""A matrix as a picture: budgets across, settings down, tokens per second in every cell.

matplotlib is imported where it is used.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from outcore.sizes import format_size

from .matrix import Cell, GridPoint
from .matrix_summary import GridSummary
from .report.charts import require_matplotlib, shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, UNFIT, EDGE = "#1d1f21", "#5f6368", "#e6e6e6", "#ffffff"
BEST = "#d62828"
CELL = (1.05, 0.34)
"""Inches of a cell."""
_FONT = 9.0
_DARK = 0.55
"""Share of the colour scale up to which it is dark enough for white numbers."""
_SETTINGS: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "outcore",
    "font.size": _FONT,
    "font.family": "sans-serif",
    "text.parse_math": False,
    "text.color": INK,
    "hatch.color": "#b5b5b5",
    "hatch.linewidth": 0.6,
    "axes.linewidth": 0,
}


def heatmap(summary: GridSummary) -> dict[str, bytes]:
    """The picture's files by name: ``heatmap.svg`` and ``heatmap.png``.

    Raises:
        UsageError: matplotlib is not installed.
    """
    require_matplotlib()
    import matplotlib

    # A font that lacks a glyph is no matter: it is drawn with another.
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
    with matplotlib.rc_context(_SETTINGS):
        figure = _figure(summary)
        files = {}
        for kind in ("svg", "png"):
            buffer = io.BytesIO()
            metadata: dict[str, Any] = {"Date": None} if kind == "svg" else {}
            figure.savefig(buffer, format=kind, dpi=160, metadata=metadata, facecolor="white")
            files[f"heatmap.{kind}"] = buffer.getvalue()
        return files


def rows_of(cells: Sequence[Cell]) -> list[tuple[str, int, int]]:
    """The settings that stream, top down: way of reading, slots, threads; one empty row where nothing streams."""
    found = dict.fromkeys((c.point.io, c.point.slots, c.point.threads) for c in cells if not c.point.resident)
    return sorted(found, key=lambda s: (s[0] != "direct", *s)) or [("none", 0, 0)]


def _figure(summary: GridSummary) -> Figure:
    from matplotlib.figure import Figure

    cells = {c.point: c for c in summary.cells}
    budgets, rows = sorted({p.memory for p in cells}), rows_of(summary.cells)
    # A Figure of its own has the Agg canvas and leaves pyplot's state, and any display, alone.
    figure = Figure(figsize=(max(6.4, 2.2 + CELL[0] * len(budgets)), 1.75 + CELL[1] * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlim(0, len(budgets))
    axes.set_ylim(len(rows), 0)
    verdict = summary.verdict()
    best = [c.point for c in verdict.equals] if verdict is not None else []
    colour_of = _colours([c.tps for c in summary.cells if c.tps is not None])
    for x, memory in enumerate(budgets):
        resident = cells.get(GridPoint(memory))
        if resident is not None:
            _draw(axes, resident, (x, 0, 1, len(rows)), colour_of, best, "all\nresident")
            continue
        for y, (way, slots, threads) in enumerate(rows):
            cell = cells.get(GridPoint(memory, way, slots, threads))
            if cell is not None:
                _draw(axes, cell, (x, y, 1, 1), colour_of, best)
    _label(axes, summary, budgets, rows, "best" if len(best) < 2 else "equally fast")
    for point in best:
        # Last, so that no neighbour's edge lies over it.
        y = 0 if point.resident else rows.index((point.io, point.slots, point.threads))
        place = (budgets.index(point.memory), y, 1, len(rows) if point.resident else 1)
        _box(axes, place, facecolor="none", edgecolor=BEST, linewidth=2.4, zorder=4, clip_on=False)
    return figure


def _colours(speeds: Sequence[float]) -> Any:
    """From tokens per second to a colour and whether it is dark."""
    from matplotlib import colormaps
    from matplotlib.colors import LogNorm, Normalize

    low, high = (min(speeds), max(speeds)) if speeds else (0.0, 1.0)
    steep = low > 0 and high > 8 * low
    norm: Any = (LogNorm if steep else Normalize)(low, high if high > low else low + 1)

    def colour(tps: float) -> tuple[Any, bool]:
        share = float(norm(tps))
        return colormaps["viridis"](0.12 + 0.83 * share), share < _DARK

    return colour


def _draw(
    axes: Axes,
    cell: Cell,
    place: tuple[float, float, float, float],
    colour_of: Any,
    best: Sequence[GridPoint],
    said: str = "",
) -> None:
    x, y, width, height = place
    if cell.tps is None:
        failed = cell.state == "failed"
        _box(axes, place, facecolor=UNFIT, edgecolor=EDGE, hatch="////" if cell.state == "unfit" else None)
        text, ink = {"failed": "failed", "missing": "not run"}.get(cell.state, ""), BEST if failed else MUTED
    else:
        fill, dark = colour_of(cell.tps)
        _box(axes, place, facecolor=fill, edgecolor=EDGE)
        text, ink = f"{cell.tps:#.3g}".rstrip(".") + "*" * cell.busy, "#ffffff" if dark else INK
    text = f"{text}\n\n{said}" if said else text
    weight = "bold" if cell.point in best else "normal"
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", color=ink, fontweight=weight, zorder=3)


def _box(axes: Axes, place: tuple[float, float, float, float], **style: Any) -> None:
    from matplotlib.patches import Rectangle

    x, y, width, height = place
    axes.add_patch(Rectangle((x, y), width, height, **({"linewidth": 1.0, "zorder": 2} | style)))


def _label(
    axes: Axes, summary: GridSummary, budgets: Sequence[int], rows: Sequence[tuple[str, int, int]], marked: str
) -> None:
    from matplotlib.patches import Patch

    model, machine = summary.blank.model, summary.blank.machine
    axes.tick_params(length=0)
    axes.set_xticks([x + 0.5 for x in range(len(budgets))], [_budget(summary.cells, b, model.layers) for b in budgets])
    streams = rows[0][0] != "none"
    axes.set_yticks(
        [y + 0.5 for y in range(len(rows))],
        [f"{threads} thread{'s' if threads > 1 else ''}" if streams else "" for _, _, threads in rows],
    )
    # What threads have in common is said once beside them.
    groups: dict[tuple[str, int], list[int]] = {}
    for y, (way, slots, _) in enumerate(rows):
        groups.setdefault((way, slots), []).append(y)
    for (way, slots), members in groups.items():
        if streams:
            middle, reach = (members[0] + members[-1] + 1) / 2, axes.get_yaxis_transform()
            axes.text(
                -0.17, middle, f"{way}\n{slots} slots", transform=reach, ha="right", va="center", linespacing=1.15
            )
            if members[0]:
                axes.plot([-0.3, 0], [members[0]] * 2, transform=reach, color=MUTED, linewidth=0.8, clip_on=False)
    axes.set_xlabel("memory budget; layers that stay resident", color=MUTED)
    title = f"{shortened(model.name, 44)}: decoded tokens per second"
    device = machine.gpu or machine.cpu
    axes.set_title(f"{title}\n{shortened(f'{device}, {machine.cores} cores; {machine.filesystem}', 84)}", loc="left")
    kinds = [Patch(facecolor="none", edgecolor=BEST, linewidth=2, label=marked)]
    if any(c.state == "unfit" for c in summary.cells):
        kinds.append(Patch(facecolor=UNFIT, hatch="////", label="does not fit"))
    if any(c.busy and c.tps is not None for c in summary.cells):
        kinds.append(Patch(alpha=0, label="* met a busy machine"))
    axes.figure.legend(handles=kinds, loc="outside lower right", frameon=False, ncols=len(kinds))


def _budget(cells: Sequence[Cell], memory: int, layers: int) -> str:
    kept = {c.row.resident_units for c in cells if c.point.memory == memory and c.row is not None and c.tps is not None}
    known = sorted(n for n in kept if n is not None)
    if not known:
        return format_size(memory)
    share = str(known[0]) if known[0] == known[-1] else f"{known[0]}–{known[-1]}"
    return f"{format_size(memory)}\n{share} of {layers}"
