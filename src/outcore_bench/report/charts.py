"""Draws charts as SVG, with text as text and the page's colour variables, for light and dark mode."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from outcore.text import shown

from ..document import Stat

WIDTH, HEIGHT, LEFT, BOTTOM = 460, 300, 44, 36
STEPS = 4
"""Grid lines and labels per axis, besides 0."""


@dataclass(frozen=True)
class ChartCurve:
    """A curve of (x, speed) points; ``colour`` is a variable of the page."""

    name: str
    colour: str
    points: tuple[tuple[float, Stat], ...]
    dashed: bool = False


def curves_chart(title: str, curves: Sequence[ChartCurve], x_label: str) -> str:
    """Returns an SVG element of tokens per second over x, both from 0."""
    most_x = max(x for curve in curves for x, _ in curve.points)
    most_y = max(stat.most for curve in curves for _, stat in curve.points)
    foot, legend = HEIGHT - BOTTOM, 16 * len(curves)

    def at(x: float, y: float) -> tuple[float, float]:
        return LEFT + x / most_x * (WIDTH - LEFT - 16), foot - y / most_y * (foot - 24)

    def text(x: float, y: float, words: str, anchor: str = "start", colour: str = "--muted") -> str:
        content = escape(shown(words))
        return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" fill="var({colour})">{content}</text>'

    def drawn(curve: ChartCurve) -> Iterator[str]:
        points = sorted(curve.points, key=lambda point: point[0])
        path = " ".join("{:.1f},{:.1f}".format(*at(x, stat.median)) for x, stat in points)
        dashes = ' stroke-dasharray="4 3"' if curve.dashed else ""
        yield f'<polyline points="{path}" fill="none" stroke="var({curve.colour})" stroke-width="2"{dashes}/>'
        for x, stat in points if not curve.dashed else ():
            (left, top), (_, low), (_, high) = (at(x, y) for y in (stat.median, stat.least, stat.most))
            yield f'<circle cx="{left:.1f}" cy="{top:.1f}" r="3" fill="var({curve.colour})"/>'
            yield f'<path d="M{left:.1f} {low:.1f}V{high:.1f}" stroke="var({curve.colour})"/>'

    parts = [text(LEFT, 14, "tokens per second"), text(WIDTH - 16, HEIGHT - 4, x_label, "end")]
    for i in range(STEPS + 1):
        x, y = at(most_x * i / STEPS, most_y * i / STEPS)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - 16}" stroke="var(--grid)"/>')
        parts.append(text(LEFT - 4, y + 4, f"{most_y * i / STEPS:.3g}", "end"))
        parts.append(text(x, foot + 16, f"{most_x * i / STEPS:.3g}", "middle"))
    for i, curve in enumerate(curves):
        parts += [*drawn(curve), text(LEFT, HEIGHT + 14 + 16 * i, curve.name, colour=curve.colour)]
    box = f'viewBox="0 0 {WIDTH} {HEIGHT + legend + 4}"'
    return f'<svg {box} role="img" aria-label="{escape(shown(title))}">{"".join(parts)}</svg>'
