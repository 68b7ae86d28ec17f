"""Charts as SVG for a page, drawn by matplotlib: text stays text, and colours are the page's variables, so that light
and dark both work.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from outcore.errors import UsageError
from outcore.text import shown

from ..document import Stat

STEEP = 12
"""The axis of speeds is logarithmic from this ratio of the fastest to the slowest."""
# matplotlib draws in these colours, and the SVG names the page's variables instead. No two may be equal.
_VARIABLES = {"--ink": "#010101", "--muted": "#020202", "--grid": "#030303"} | {
    f"--series-{i}": f"#04040{i}" for i in range(6)
}
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "outcore",
    "font.size": 9,
    "font.family": "sans-serif",
    "text.parse_math": False,
    "text.color": _VARIABLES["--ink"],
    "axes.labelcolor": _VARIABLES["--muted"],
    "axes.edgecolor": _VARIABLES["--grid"],
    "grid.color": _VARIABLES["--grid"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": _VARIABLES["--muted"],
    "ytick.color": _VARIABLES["--muted"],
    "axes.axisbelow": True,
}


@dataclass(frozen=True)
class ChartCurve:
    """Marks that belong together: places and speeds, with least and most. ``dashed`` has no spread; ``colour`` is a
    variable of the page's style."""

    name: str
    colour: str
    points: tuple[tuple[float, Stat], ...]
    dashed: bool = False


def require_matplotlib() -> None:
    """Raise ``UsageError`` where matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as e:
        raise UsageError('charts need matplotlib: pip install "outcore[report]"') from e


def curves_chart(title: str, curves: Sequence[ChartCurve], x_label: str, *, x_percent: bool = False) -> str:
    """Tokens per second over ``x``, as an SVG element."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph ")  # A browser draws the text, whatever glyphs a font here lacks.
        # A Figure of its own leaves pyplot's state, and any display, alone.
        figure = Figure(figsize=(4.6, 3.3), layout="constrained")
        axes = figure.add_subplot()
        for curve in curves:
            points = sorted(curve.points, key=lambda point: point[0])
            xs, ys = [x for x, _ in points], [stat.median for _, stat in points]
            style: dict[str, Any] = {"color": _VARIABLES[curve.colour], "label": shown(curve.name)}
            if curve.dashed:
                axes.plot(xs, ys, linestyle=(0, (4, 3)), linewidth=1.3, marker="_", markersize=9, **style)
            else:
                spread = [[s.median - s.least for _, s in points], [s.most - s.median for _, s in points]]
                axes.errorbar(xs, ys, yerr=spread, linewidth=2, marker="o", markersize=5, capsize=3, **style)
        speeds = [stat.median for curve in curves for _, stat in curve.points]
        if max(speeds) > STEEP * min(speeds):
            axes.set_yscale("log")
            axes.yaxis.set_minor_formatter(lambda v, _: "")
        else:
            axes.set_ylim(bottom=0)
        axes.margins(x=0.06)
        axes.set_xlabel(x_label)
        axes.set_title("tokens per second", loc="left", fontsize=9, color=_VARIABLES["--muted"])
        axes.xaxis.set_major_formatter(lambda v, _: f"{100 * v:.0f} %" if x_percent else f"{v:g}")
        axes.yaxis.set_major_formatter(lambda v, _: f"{v:g}")
        axes.grid(axis="y", linewidth=0.8)
        figure.legend(loc="outside lower left", frameon=False, ncols=2, labelcolor="linecolor")
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return _element(buffer.getvalue(), title)


def _element(text: str, title: str) -> str:
    """An SVG file as an element of a page: no header, metadata or namespaces, ids of its own, the page's colours."""
    own = re.sub(r"\W", "", title) + "-"
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text[text.index("<svg") :], flags=re.S)
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text).replace("xlink:href=", "href=")
    text = text.replace('id="', f'id="{own}').replace('href="#', f'href="#{own}').replace("url(#", f"url(#{own}")
    text = re.sub(r"font: [^;\"]*|font-family: [^;\"]*", "font: 12.5px var(--font)", text)
    for variable, colour in _VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    head, body = text.split(">", 1)
    box = re.search(r'viewBox="[^"]*"', head)
    return f'<svg {box[0] if box else ""} role="img" aria-label="{escape(shown(title))}">{body.strip()}'
