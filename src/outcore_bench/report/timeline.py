"""One sweep over time: reads in one lane, compute in the other, so that overlap is seen."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..document import TimelineBar
from .charts import MUTED, SERIES, figure_of, svg_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LANES = (("read", "disk reads", SERIES[0]), ("compute", "compute", SERIES[2]))
# Reads that run at once lie over each other in their lane, up to so many deep.
_DEEPEST = 4


def spans(bars: Sequence[TimelineBar], kind: str) -> list[tuple[float, float]]:
    """When at least one bar of ``kind`` was under way: intervals in order, none touching the next."""
    out: list[tuple[float, float]] = []
    for begin, end in sorted((b.begin, b.end) for b in bars if b.kind == kind):
        if out and begin <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((begin, end))
    return out


def covered(bars: Sequence[TimelineBar]) -> tuple[float, float, float]:
    """Seconds of reading, seconds of computing, and seconds of both at once."""
    reads, computes = spans(bars, "read"), spans(bars, "compute")
    both = sum(max(0.0, min(e, f) - max(b, c)) for b, e in reads for c, f in computes)
    return sum(e - b for b, e in reads), sum(e - b for b, e in computes), both


def drawable(bars: Sequence[TimelineBar] | None) -> bool:
    """Whether there are reads and compute to lay side by side."""
    return bool(bars) and {"read", "compute"} <= {b.kind for b in bars or ()}


def timeline_chart(name: str, title: str, bars: Sequence[TimelineBar], width: float, until: float) -> str:
    """Two lanes over milliseconds; ``until`` (seconds) is the axis's end, the same for sweeps that are compared."""
    with figure_of(width, 2.2) as figure:
        axes = figure.add_subplot()
        first = min(0.0, min(b.begin for b in bars))
        span = max(until - first, 1e-9)
        for at, (kind, _, colour) in enumerate(_LANES):
            lane = sorted((b for b in bars if b.kind == kind), key=lambda b: (b.begin, b.end))
            rows = _stack(lane)
            deep = max(rows, default=0) + 1
            height = 0.76 / deep
            lefts, widths = [1000 * b.begin for b in lane], [1000 * max(b.end - b.begin, 0.0) for b in lane]
            ys = [at - 0.38 + (row + 0.5) * height for row in rows]
            # Neighbours are told apart by an alternate shade; a thin edge would vanish among many.
            shades = [0.95 if i % 2 == 0 else 0.6 for i in range(len(lane))]
            for left, wide, y, shade in zip(lefts, widths, ys, shades, strict=True):
                axes.barh(y, wide, left=left, height=height * 0.92, color=colour, alpha=shade, linewidth=0)
            _label_some(axes, lane, ys, width, span)
        axes.set_yticks([0, 1], [text for _, text, _ in _LANES])
        for tick, (_, _, colour) in zip(axes.get_yticklabels(), _LANES, strict=True):
            tick.set_color(colour)
            tick.set_fontweight("bold")
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        axes.set_ylim(1.45, -0.62)
        axes.set_xlim(1000 * (first - 0.004 * span), 1000 * (until + 0.004 * span))
        axes.set_xlabel("milliseconds from the sweep's beginning")
        axes.xaxis.set_major_formatter(lambda v, _: f"{v:g}")
        return svg_of(figure, name, title)


def _stack(lane: Sequence[TimelineBar]) -> list[int]:
    """The row of each bar in its lane: the lowest one that is free when it begins."""
    free: list[float] = []
    out = []
    for bar in lane:
        row = next((i for i, end in enumerate(free) if end <= bar.begin), len(free))
        if row == len(free) and len(free) < _DEEPEST:
            free.append(bar.end)
        row = min(row, len(free) - 1)
        free[row] = max(free[row], bar.end)
        out.append(row)
    return out


def _label_some(axes: Axes, lane: Sequence[TimelineBar], ys: Sequence[float], width: float, span: float) -> None:
    """Name so many bars, evenly chosen, as fit without touching; over the lane's top."""
    room = max(2, int(width * 100 / 70))
    step = max(1, -(-len(lane) // room))
    last = -1.0
    top = round(min(ys, default=0.0))
    for i, bar in enumerate(lane):
        middle = (bar.begin + bar.end) / 2
        if i % step or middle - last < span / room:
            continue
        last = middle
        axes.text(1000 * middle, top - 0.48, short(bar.unit), ha="center", va="center", color=MUTED)


def short(unit: str) -> str:
    """``modules.layers.12`` and ``layer_0012`` are ``12``; other names stay."""
    number = re.search(r"(\d+)\D*$", unit)
    return str(int(number[1])) if number else unit[:12]
