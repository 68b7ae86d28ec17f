"""Charts as SVG for a page: text stays text, and colours are the page's variables, so that light and dark both work.

matplotlib is imported where it is used.
"""

from __future__ import annotations

import io
import logging
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import quoteattr

from outcore.errors import UsageError
from outcore.text import shown

from ..document import Stat, TimelineBar

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# matplotlib draws in these, and the SVG says the page's variable instead. No two may be equal.
INK, MUTED, GRID = "#010101", "#020202", "#030303"
SERIES = ("#040401", "#040402", "#040403", "#040404", "#040405", "#040406")
_VARIABLES = {INK: "--ink", MUTED: "--muted", GRID: "--grid"} | {c: f"--series-{i}" for i, c in enumerate(SERIES)}
# A loop keeps its colour in every chart; those not known here share one.
MODES = {"outcore": 0, "plain": 1, "mlx-lm": 2}
_LANES = (("compute", SERIES[2]), ("read", SERIES[0]))

WIDTH = 4.6  # inches of 100 points: at a phone's width, text of 12.5 points is still readable
_POINT = 72 / 100


@dataclass(frozen=True)
class ChartCurve:
    """Marks that belong together: places and speeds, with least and most; ``dashed`` has no spread."""

    name: str
    colour: str
    points: tuple[tuple[float, Stat], ...]
    dashed: bool = False


def require_matplotlib() -> None:
    """Find out early whether charts can be drawn.

    Raises:
        UsageError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as e:
        raise UsageError('charts need matplotlib: pip install "outcore[report]"') from e


def curves_chart(name: str, title: str, curves: Sequence[ChartCurve], x_label: str, *, x_percent: bool = False) -> str:
    """Tokens a second over ``x``."""
    with figure_of(WIDTH, 3.3) as figure:
        axes = figure.add_subplot()
        speeds = [stat.median for curve in curves for _, stat in curve.points]
        steep = max(speeds) > 12 * min(speeds)
        for curve in curves:
            points = sorted(curve.points, key=lambda p: p[0])
            xs, ys = [x for x, _ in points], [stat.median for _, stat in points]
            style: dict[str, Any] = {"color": curve.colour, "label": shown(curve.name)}
            if curve.dashed:
                axes.plot(xs, ys, linestyle=(0, (4, 3)), linewidth=1.3, marker="_", markersize=9, **style)
            else:
                reach = [[s.median - s.least for _, s in points], [s.most - s.median for _, s in points]]
                axes.errorbar(xs, ys, yerr=reach, linewidth=2, marker="o", markersize=5, capsize=3, **style)
        if steep:
            axes.set_yscale("log")
            axes.yaxis.set_minor_formatter(lambda v, _: "")
        else:
            axes.set_ylim(bottom=0)
        axes.margins(x=0.06)
        axes.set_xlabel(x_label)
        axes.set_title("tokens per second", loc="left", fontsize=12.5 * _POINT, color=MUTED)
        axes.xaxis.set_major_formatter(lambda v, _: f"{100 * v:.0f} %" if x_percent else f"{v:g}")
        axes.yaxis.set_major_formatter(lambda v, _: f"{v:g}")
        axes.grid(axis="y", linewidth=0.8)
        figure.legend(loc="outside lower left", frameon=False, ncols=2, labelcolor="linecolor")
        return svg_of(figure, name, title)


def timeline_chart(name: str, title: str, bars: Sequence[TimelineBar], until: float) -> str:
    """Reads in one lane and computations in the other, over milliseconds; ``until`` (seconds) is the axis's end, the
    same for sweeps that are compared."""
    with figure_of(2 * WIDTH, 1.7) as figure:
        axes = figure.add_subplot()
        for y, (kind, colour) in enumerate(_LANES):
            lane = [(1000 * b.begin, 1000 * (b.end - b.begin)) for b in bars if b.kind == kind]
            # Neighbours are told apart by an alternate shade; a thin edge would vanish among many.
            axes.broken_barh(lane[::2], (y - 0.38, 0.76), facecolors=colour, alpha=0.95)
            axes.broken_barh(lane[1::2], (y - 0.38, 0.76), facecolors=colour, alpha=0.6)
        axes.set_yticks([0, 1], ["compute", "disk reads"])
        axes.set_xlim(1000 * min(0.0, *(b.begin for b in bars)), 1000 * until)
        axes.set_xlabel("milliseconds from the sweep's beginning")
        return svg_of(figure, name, title)


@contextmanager
def figure_of(width: float, height: float, *, of_page: bool = True) -> Iterator[Figure]:
    """A figure, in inches; ``of_page``: in the page's colours.

    Raises:
        UsageError: matplotlib is not installed.
    """
    require_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure

    ink, muted, grid = (INK, MUTED, GRID) if of_page else ("#1d1f21", "#5f6368", "#e4e4e4")
    settings: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": "outcore",
        "font.size": 12.5 * _POINT,
        "font.family": "sans-serif",
        "text.parse_math": False,
        "text.color": ink,
        "axes.labelcolor": muted,
        "axes.edgecolor": grid,
        "grid.color": grid,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "xtick.color": muted,
        "ytick.color": muted,
        "axes.axisbelow": True,
    }
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        # A font that lacks a glyph is no matter: the browser draws the text.
        warnings.filterwarnings("ignore", "Glyph ")
        # A Figure of its own has the Agg canvas and leaves pyplot's state, and any display, alone.
        yield Figure(figsize=(width, height), layout="constrained")


def svg_of(figure: Figure, name: str, title: str) -> str:
    """The figure as an element for a page: no header, no namespaces, no metadata; ids are ``name``'s own."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text, flags=re.S)
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text).replace("xlink:href=", "href=")
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'href="#', f'href="#{name}-', text).replace("url(#", f"url(#{name}-")
    text = re.sub(r"(font: [^;\"]*?[\d.]+px) [^;\"]*", r"\1 var(--font)", text)  # as matplotlib before 3.11 has it
    text = re.sub(r"font-family: [^;\"]*", "font-family: var(--font)", text)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    box = re.search(r'viewBox="([^"]*)"', text)
    head = f'<svg viewBox="{box[1] if box else ""}" role="img" aria-label={quoteattr(shown(title))}>'
    body = text[text.index(">") + 1 :]
    return head + re.sub(r"\n\s*\n+", "\n", body).strip()
