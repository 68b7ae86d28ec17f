"""Speed against memory as a picture. matplotlib is imported where it is used."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outcore.errors import OutcoreError
from outcore.plan.plan import Plan

from .report.charts import require_matplotlib

LINE, BEST, THIS, INK, GRID = "#0b6e99", "#d62828", "#1d1f21", "#1d1f21", "#e4e4e4"
_SETTINGS: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "outcore",
    "font.family": "sans-serif",
    "font.size": 10.0,
    "text.parse_math": False,
    "text.color": INK,
    "axes.edgecolor": "#9aa0a6",
}


def plot_speed(path: Path, plans: Sequence[Plan], plan: Plan, best: Plan | None, title: str) -> None:
    """Write predicted tokens per second against the budget.

    Raises:
        UsageError: matplotlib is not installed.
        OutcoreError: the file cannot be written.
    """
    require_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure

    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
    with matplotlib.rc_context(_SETTINGS):
        figure = Figure(figsize=(7.2, 4.2), layout="constrained")
        axes = figure.add_subplot()
        streamed = [p for p in plans if p.streams]
        axes.plot([_gb(p) for p in streamed], [1 / p.token_s for p in streamed], color=LINE, lw=2, marker="o", ms=3.5)
        for p in plans:
            if not p.streams:
                axes.plot(_gb(p), 1 / p.token_s, marker="s", color=LINE, ms=6)
                _label(axes, p, "everything resident", LINE)
                break
        if best is not None and best.streams:
            axes.plot(_gb(best), 1 / best.token_s, marker="o", color=BEST, ms=8)
            _label(axes, best, "recommended", BEST)
        if plan.streams and (best is None or plan.budget_bytes != best.budget_bytes):
            axes.plot(_gb(plan), 1 / plan.token_s, marker="D", color=THIS, ms=6)
            _label(axes, plan, "this plan", THIS)
        axes.set_title(f"{title}: predicted speed against memory", loc="left", fontsize=11)
        axes.set_xlabel("memory, GB")
        axes.set_ylabel("tokens per second")
        axes.set_ylim(bottom=0, top=1.18 * max(1 / p.token_s for p in plans))
        axes.grid(color=GRID, lw=0.8)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        kind = path.suffix.lower().removeprefix(".")
        metadata: dict[str, Any] = {"Date": None} if kind == "svg" else {}
        try:
            figure.savefig(path, format=kind, dpi=160, metadata=metadata, facecolor="white")
        except OSError as e:
            raise OutcoreError(f"--plot {path}: cannot be written: {e.strerror}") from e


def _gb(plan: Plan) -> float:
    return plan.budget_bytes / 1e9


def _label(axes: Any, plan: Plan, text: str, color: str) -> None:
    left = axes.get_xlim()[1] > 0 and _gb(plan) > 0.6 * axes.get_xlim()[1]
    axes.annotate(
        text,
        (_gb(plan), 1 / plan.token_s),
        xytext=(-8 if left else 8, 8 if text != "this plan" else -16),
        textcoords="offset points",
        ha="right" if left else "left",
        color=color,
    )
