"""Charts as SVG for a page: text stays text, and colours are the page's variables, so that light and dark both work.

What is drawn is told in ``sections``; here is only how. matplotlib is imported where it is used.
"""

from __future__ import annotations

import io
import logging
import math
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import quoteattr

from outcore.errors import UsageError
from outcore.text import shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# matplotlib draws in these, and the SVG says the page's variable instead. No two may be equal.
INK, MUTED, GRID = "#010101", "#020202", "#030303"
SERIES = ("#040401", "#040402", "#040403", "#040404", "#040405", "#040406")
SOFT = "#050505"
_VARIABLES = {INK: "--ink", MUTED: "--muted", GRID: "--grid", SOFT: "--soft"} | {
    colour: f"--series-{i}" for i, colour in enumerate(SERIES)
}
# A loop keeps its colour in every chart.
MODES = {"outcore": 0, "plain": 1, "mlx-lm": 2}

WIDTH = 4.6  # inches of 100 points: at a phone's width, text of 12.5 points is still readable
_POINT = 72 / 100


@dataclass(frozen=True)
class ChartPoint:
    """A mark at ``x``, ``y``, with least and most of ``y``."""

    x: float
    y: float
    least: float
    most: float
    label: str = ""


@dataclass(frozen=True)
class ChartCurve:
    """Points that belong together; ``colour`` counts into the page's series colours."""

    name: str
    colour: int
    points: tuple[ChartPoint, ...]
    dashed: bool = False


@dataclass(frozen=True)
class ChartStrip:
    """A horizontal bar: its name, its length, and what is written at its end."""

    name: str
    value: float | None
    colour: int
    text: str
    least: float | None = None
    most: float | None = None
    mark: float | None = None


def require_matplotlib() -> None:
    """Find out early whether charts can be drawn.

    Raises:
        UsageError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as e:
        raise UsageError('charts need matplotlib: pip install "outcore[report]"') from e


def mode_colour(mode: str, others: Sequence[str] = ()) -> int:
    """The series colour of a loop; those not known here take the colours that are left, in order of ``others``."""
    if mode in MODES:
        return MODES[mode]
    unknown = [m for m in others if m not in MODES]
    free = len(SERIES) - len(MODES)
    return len(MODES) + (unknown.index(mode) if mode in unknown else 0) % free


def curves_chart(name: str, title: str, curves: Sequence[ChartCurve], x_label: str, *, x_percent: bool = False) -> str:
    """Tokens a second over ``x``; each curve is labelled at its end."""
    with figure_of(WIDTH, 3.1) as figure:
        axes = figure.add_subplot()
        values = [p.y for c in curves for p in c.points]
        steep = max(values) > 12 * min(values)
        if steep:
            axes.set_yscale("log")
        ends: list[tuple[ChartCurve, str]] = []
        for curve in curves:
            colour = MUTED if curve.dashed else SERIES[curve.colour]
            points = sorted(curve.points, key=lambda p: p.x)
            xs, ys = [p.x for p in points], [p.y for p in points]
            if curve.dashed:
                axes.plot(xs, ys, color=colour, linestyle=(0, (4, 3)), linewidth=1.3, marker="_", markersize=9)
            else:
                reach = [[p.y - p.least for p in points], [p.most - p.y for p in points]]
                axes.errorbar(xs, ys, yerr=reach, color=colour, linewidth=2, marker="o", markersize=5, capsize=3)
            ends.append((curve, colour))
        low, high = min(p.x for c in curves for p in c.points), max(p.x for c in curves for p in c.points)
        span = (high - low) or abs(high) or 1.0
        axes.set_xlim(low - 0.05 * span, high + 0.05 * span)
        if steep:
            axes.set_ylim(min(values) / 1.6, max(values) * 1.8)
        else:
            axes.set_ylim(0, max(p.most for c in curves for p in c.points) * 1.22)
        axes.set_xlabel(x_label)
        axes.set_title("tokens per second", loc="left", fontsize=12.5 * _POINT, color=MUTED)
        axes.xaxis.set_major_formatter(lambda v, _: f"{100 * v:.0f} %" if x_percent else f"{v:g}")
        axes.yaxis.set_major_formatter(lambda v, _: f"{v:g}")
        if steep:
            axes.yaxis.set_minor_formatter(lambda v, _: "")
        axes.grid(axis="y", color=GRID, linewidth=0.8)
        _label_ends(axes, ends, steep)
        return svg_of(figure, name, title)


def _label_ends(axes: Axes, ends: Sequence[tuple[ChartCurve, str]], steep: bool) -> None:
    """Write each curve's name at its last point, where neither a curve nor another name is in the way.

    Tried in this order: above the point, to the right of it, below it, further above, to the left of a steep end. All
    in fractions of the axes.
    """
    low, high = axes.get_ylim()
    left, right = axes.get_xlim()

    def place(x: float, y: float) -> tuple[float, float]:
        up = math.log(max(y, low) / low) / math.log(high / low) if steep else (y - low) / (high - low)
        return (x - left) / (right - left), up

    drawn: list[tuple[float, float]] = []
    for curve, _ in ends:
        points = sorted(curve.points, key=lambda p: p.x)
        drawn += [place(p.x, p.least + (p.most - p.least) * i / 20) for p in points for i in range(21)]
        for one, two in pairwise(place(p.x, p.y) for p in points):
            drawn += [(one[0] + (two[0] - one[0]) * i / 40, one[1] + (two[1] - one[1]) * i / 40) for i in range(40)]
    taken: list[tuple[float, float, float]] = []

    def free(begin: float, end: float, at: float) -> bool:
        if not 0.03 < at < 0.98 or any(abs(at - y) < 0.09 and begin < e and b < end for b, e, y in taken):
            return False
        return not any(begin - 0.01 < x < end + 0.01 and abs(y - at) < 0.045 for x, y in drawn)

    for curve, colour in sorted(ends, key=lambda e: -max(e[0].points, key=lambda p: p.x).y):
        last = max(curve.points, key=lambda p: p.x)
        x, y = place(last.x, last.y)
        wide = 0.026 * len(curve.name)
        begin = min(max(0.0, x - wide), 1 - wide)
        steps = [0.03 * i for i in range(12)]
        places = [(begin, y + 0.075), (x + 0.03, y), (x + 0.03, y - 0.03), *((begin, y - 0.075 - s) for s in steps)]
        places += [(begin, y + 0.075 + s) for s in steps]
        places += [(x - wide - aside, y - s) for aside in (0.04, 0.1, 0.16) for s in steps if x - wide > aside]
        fits = (p for p in places if p[0] + wide <= 1.001 and free(p[0], p[0] + wide, p[1]))
        begin, at = next(fits, (begin, min(0.97, y + 0.075)))
        taken.append((begin, begin + wide, at))
        anchor, side = (begin + wide, "right") if begin < x else (begin, "left")
        axes.text(
            anchor, at, curve.name, transform=axes.transAxes, ha=side, va="center", color=colour, fontweight="bold"
        )


def strips_chart(name: str, title: str, strips: Sequence[ChartStrip]) -> str:
    """Horizontal bars with their values beside them; a ``mark`` is a tick across the bar."""
    with figure_of(WIDTH, 0.35 + 0.5 * len(strips)) as figure:
        axes = figure.add_subplot()
        longest = max((max(s.value or 0, s.most or 0, s.mark or 0) for s in strips), default=0) or 1.0
        for i, strip in enumerate(strips):
            colour = SERIES[strip.colour]
            axes.text(0, i - 0.3, shortened(strip.name), va="center", ha="left", color=INK, in_layout=False)
            if strip.value is None:
                axes.text(
                    0,
                    i + 0.12,
                    shortened(strip.text),
                    va="center",
                    ha="left",
                    color=MUTED,
                    style="italic",
                    in_layout=False,
                )
                continue
            axes.barh(i + 0.12, strip.value, height=0.36, color=colour)
            if strip.least is not None and strip.most is not None and strip.most > strip.least:
                axes.plot([strip.least, strip.most], [i + 0.12] * 2, color=INK, linewidth=1.2)
            if strip.mark is not None:
                axes.plot([strip.mark] * 2, [i - 0.1, i + 0.34], color=INK, linewidth=1.6)
            end = max(strip.value, strip.mark or 0, strip.most or 0)
            axes.text(end + 0.015 * longest, i + 0.12, strip.text, va="center", ha="left", color=INK, fontweight="bold")
        axes.set_xlim(0, longest * 1.25)
        axes.set_ylim(len(strips) - 0.5, -0.6)
        axes.axis("off")
        return svg_of(figure, name, title)


def shares_chart(name: str, title: str, rows: Sequence[tuple[str, float, float]]) -> str:
    """Of the time a token takes: a read under way (whole bar), and waiting for one (its solid part). Shares of 1."""
    with figure_of(WIDTH, 0.35 + 0.5 * len(rows)) as figure:
        axes = figure.add_subplot()
        for i, (label, reading, waiting) in enumerate(rows):
            axes.text(0, i - 0.3, shortened(label, 38), va="center", ha="left", color=INK, in_layout=False)
            axes.barh(i + 0.12, 1, height=0.36, color=GRID)
            axes.barh(i + 0.12, reading, height=0.36, color=SOFT)
            axes.barh(i + 0.12, waiting, height=0.36, color=SERIES[1])
            text = f"{100 * reading:.0f} % read, {100 * waiting:.0f} % waited"
            axes.text(1.0, i - 0.3, text, va="center", ha="right", color=INK, fontweight="bold")
        axes.set_xlim(0, 1)
        axes.set_ylim(len(rows) - 0.5, -0.6)
        axes.axis("off")
        return svg_of(figure, name, title)


def shortened(text: str, most: int = 56) -> str:
    """Text for a line of a chart; the table has the whole of it."""
    return text if len(text) <= most else f"{text[: most - 1].rstrip()}…"


@contextmanager
def figure_of(width: float, height: float) -> Iterator[Figure]:
    require_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure

    settings: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": "outcore",
        "font.size": 12.5 * _POINT,
        "font.family": "sans-serif",
        "text.parse_math": False,
        "text.color": INK,
        "axes.labelcolor": MUTED,
        "axes.edgecolor": GRID,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "xtick.color": MUTED,
        "ytick.color": MUTED,
        "axes.axisbelow": True,
    }
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
    with matplotlib.rc_context(settings):
        # A Figure of its own has the Agg canvas and leaves pyplot's state, and any display, alone.
        yield Figure(figsize=(width, height), layout="constrained")


def svg_of(figure: Figure, name: str, title: str) -> str:
    """The figure as an element for a page: no header, no namespaces, no metadata; ids are ``name``'s own."""
    from matplotlib.text import Text

    for drawn in figure.findobj(Text):
        drawn.set_text(shown(drawn.get_text()))
    buffer = io.StringIO()
    with warnings.catch_warnings():
        # A font that lacks a glyph is no matter: the browser draws the text.
        warnings.filterwarnings("ignore", "Glyph ")
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.S)
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text).replace("xlink:href=", "href=")
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'href="#', f'href="#{name}-', text).replace("url(#", f"url(#{name}-")
    text = re.sub(r"(font: [^;\"]*?[\d.]+px) [^;\"]*", r"\1 var(--font)", text)  # as matplotlib before 3.11 has it
    text = re.sub(r"font-family: [^;\"]*", "font-family: var(--font)", text)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    box = re.search(r'viewBox="([^"]*)"', text)
    head = f'<svg viewBox="{box[1] if box else ""}" role="img" aria-label={quoteattr(title)}>'
    body = text[text.index(">") + 1 :]
    return head + re.sub(r"\n\s*\n+", "\n", body).strip()
