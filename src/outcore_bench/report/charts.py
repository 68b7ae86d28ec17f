"""Charts as SVG for a page: text stays text, and colours are the page's variables, so that light and dark both work."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from outcore.text import shown

from ..document import Stat

WIDTH, HEIGHT = 460.0, 300.0  # at a phone's width, text of 13 units is still readable
LEFT, RIGHT, TOP, BOTTOM = 50.0, 14.0, 28.0, 44.0  # around the curves
LEGEND = 18.0  # a line of it
STEEP = 12
"""Times the slowest speed that the fastest is, from which on speeds are drawn by their logarithms."""


@dataclass(frozen=True)
class ChartCurve:
    """Marks that belong together: places and speeds, with least and most. ``dashed`` has no spread; ``colour`` is a
    variable of the page's style."""

    name: str
    colour: str
    points: tuple[tuple[float, Stat], ...]
    dashed: bool = False


def curves_chart(title: str, curves: Sequence[ChartCurve], x_label: str, *, x_percent: bool = False) -> str:
    """Tokens a second over ``x``."""
    speeds = [s for curve in curves for _, stat in curve.points for s in (stat.least, stat.median, stat.most) if s > 0]
    steep = max(speeds) > STEEP * min(speeds)
    y_ticks = _powers(min(speeds), max(speeds)) if steep else _steps(max(speeds))
    x_ticks = _steps(max(x for curve in curves for x, _ in curve.points))

    def x_at(x: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * x / x_ticks[-1]

    def y_at(y: float) -> float:
        low, high, at = (math.log(v) if steep else v for v in (y_ticks[0], y_ticks[-1], max(y, y_ticks[0])))
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (at - low) / (high - low)

    parts = [_text(LEFT, 14, "tokens per second"), _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, x_label, "middle")]
    for y in y_ticks:
        parts.append(_line(LEFT, y_at(y), WIDTH - RIGHT, y_at(y), "--grid"))
        parts.append(_text(LEFT - 6, y_at(y) + 4, f"{y:g}", "end"))
    for x in x_ticks:
        label = f"{100 * x:.0f} %" if x_percent else f"{x:g}"
        parts.append(_text(x_at(x), HEIGHT - BOTTOM + 18, label, "middle"))
    for i, curve in enumerate(curves):
        places = [(x_at(x), y_at(stat.median)) for x, stat in sorted(curve.points, key=lambda point: point[0])]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        dashes = ' stroke-dasharray="5 4"' if curve.dashed else ""
        parts.append(f'<polyline points="{path}" fill="none" stroke="var({curve.colour})" stroke-width="2"{dashes}/>')
        for x, stat in curve.points if not curve.dashed else ():
            parts.append(_line(x_at(x), y_at(stat.least), x_at(x), y_at(stat.most), curve.colour))
            parts.append(
                f'<circle cx="{x_at(x):.1f}" cy="{y_at(stat.median):.1f}" r="3.5" fill="var({curve.colour})"/>'
            )
        at = LEFT + i % 2 * (WIDTH - LEFT) / 2
        parts.append(_text(at, HEIGHT + LEGEND * (0.7 + i // 2), curve.name, colour=curve.colour))
    height = HEIGHT + LEGEND * -(-len(curves) // 2)
    head = f'<svg viewBox="0 0 {WIDTH:g} {height:g}" role="img" aria-label="{escape(shown(title))}">'
    return "\n".join([head, *parts, "</svg>"])


def _steps(most: float) -> list[float]:
    """Round numbers from 0 to at least ``most``, at most seven."""
    power = 10.0 ** math.floor(math.log10(most)) if most > 0 else 1.0
    step = next(power * part for part in (0.2, 0.25, 0.5, 1, 2) if most <= 6 * power * part)
    return [round(step * i, 12) for i in range(max(1, math.ceil(most / step)) + 1)]


def _powers(least: float, most: float) -> list[float]:
    """Powers of ten from at most ``least`` to at least ``most``."""
    return [10.0**n for n in range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1)]


def _line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="var({colour})"/>'


def _text(x: float, y: float, text: str, anchor: str = "start", colour: str = "--muted") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="var({colour})"'
    return f"<text {place}>{escape(shown(text))}</text>"
