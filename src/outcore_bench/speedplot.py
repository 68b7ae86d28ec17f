"""Speed against memory as a picture. matplotlib is imported where it is used."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outcore.errors import OutcoreError
from outcore.plan.plan import Plan

from .report.charts import figure_of

LINE, BEST, THIS = "#0b6e99", "#d62828", "#1d1f21"


def plot_speed(path: Path, plans: Sequence[Plan], plan: Plan, best: Plan | None, title: str) -> None:
    """Write predicted tokens per second against the budget.

    Raises:
        UsageError: matplotlib is not installed.
        OutcoreError: the file cannot be written.
    """
    whole = next((p for p in plans if not p.streams), None)
    marks = (("everything resident", whole, LINE), ("recommended", best, BEST), ("this plan", plan, THIS))
    with figure_of(7.2, 4.2, of_page=False) as figure:
        axes = figure.add_subplot()
        streamed = [p for p in plans if p.streams]
        axes.plot(*_places(streamed), color=LINE, linewidth=2, marker="o", markersize=3.5)
        for name, of, colour in marks:
            if of is not None:
                axes.plot(*_places([of]), color=colour, marker="D", markersize=7, linestyle="", label=name)
        axes.set_title(f"{title}: predicted speed against memory", loc="left", fontsize=11)
        axes.set(xlabel="memory, GB", ylabel="tokens per second")
        axes.set_ylim(bottom=0)
        axes.grid(linewidth=0.8)
        axes.legend(frameon=False, loc="best")
        kind = path.suffix.lower().removeprefix(".")
        metadata: dict[str, Any] = {"Date": None} if kind == "svg" else {}
        try:
            figure.savefig(path, format=kind, dpi=160, metadata=metadata, facecolor="white")
        except OSError as e:
            raise OutcoreError(f"--plot {path}: cannot be written: {e.strerror}") from e


def _places(plans: Sequence[Plan]) -> tuple[list[float], list[float]]:
    return [p.budget_bytes / 1e9 for p in plans], [1 / p.token_s for p in plans]
