"""Builds the sections of a report; those without data are left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..document import BenchRow, Document, Inputs, Stat
from ..verdict import by_budget, place, sentences
from . import tables
from .charts import ChartCurve, curves_chart
from .tables import ReportTable, ceiling, document_name, number, size, speed, streams

_MODES = {"outcore": "Outcore", "plain": "naive streaming", "mlx-lm": "mlx-lm, all in memory"}
"""Names of modes in charts. Each has its own colour; other modes share one."""


@dataclass(frozen=True)
class Chart:
    heading: str
    svg: str


@dataclass(frozen=True)
class Section:
    """A part of a report. ``verdict`` are sentences before the table, ``notes`` are about single rows."""

    name: str
    title: str
    text: str = ""
    table: ReportTable | None = None
    charts: tuple[Chart, ...] = ()
    verdict: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def sections(inputs: Inputs) -> list[Section]:
    documents = [replace(d, rows=sorted(d.rows, key=place)) if _is_matrix(d) else d for d in inputs.documents]
    text = tables.LEGEND + tables.BUSY_LEGEND * any(r.busy for d in documents for r in d.rows)
    many = "s" * (len(documents) > 1)
    verdicts = tuple(line for d in documents if _is_matrix(d) for line in sentences(d.rows))
    main = tables.main_table(documents)
    charts = [_chart(d, document_name(d, documents) if many else "") for d in _best(documents)]
    found = [
        Section("machines", f"Machine{many}", "", tables.machines_table(documents)),
        Section("results", "Results", text, main, verdict=verdicts, notes=tables.notes(documents)),
        Section("memory", "Speed against memory", charts=tuple(chart for chart in charts if chart is not None)),
        Section("perplexity", "Perplexity", "", tables.perplexity_table(inputs.perplexities)),
    ]
    return [s for s in found if s.table or s.charts]


def _is_matrix(document: Document) -> bool:
    return "grid" in document.settings


def _best(documents: Sequence[Document]) -> list[Document]:
    return [replace(d, rows=by_budget(d.rows)) if _is_matrix(d) else d for d in documents]


def _chart(document: Document, heading: str) -> Chart | None:
    """Draws speed over peak memory, a curve per mode and Outcore's ceiling; None if there is only one memory size."""
    points: dict[str, list[tuple[float, Stat]]] = {}
    ceilings = []
    for row in document.rows:
        stat, best = row.speed.decode_tps, ceiling(row)
        if row.error is None and row.use.peak_memory_bytes and stat is not None and stat.median > 0:
            at = row.use.peak_memory_bytes / 1e9
            points.setdefault(row.mode, []).append((at, stat))
            if best is not None and row.mode == "outcore":
                ceilings.append((at, Stat(best, best, best, 1)))
    if len({at for marks in points.values() for at, _ in marks}) < 2:
        return None
    colours = {mode: f"--series-{i}" for i, mode in enumerate(_MODES)}
    curves = [ChartCurve(_MODES.get(m, m), colours.get(m, "--series-3"), tuple(marks)) for m, marks in points.items()]
    curves += [ChartCurve("ceiling", "--muted", tuple(ceilings), dashed=True)] if ceilings else []
    return Chart(heading, curves_chart(f"Speed against memory: {document.model.name}", curves, "peak memory, GB"))


def summary(inputs: Inputs) -> str:
    """Returns a sentence on speed and memory for each machine, from its document with the most rows."""
    headlines = [(d, row) for d in _best(inputs.documents) if (row := _headline(d)) is not None]
    fullest = {}
    for d, row in sorted(headlines, key=lambda pair: (len(pair[0].rows), pair[0].model.nbytes)):
        fullest[tables.machine_name(d.machine)] = _sentence(d, row)
    text = " ".join([*fullest.values(), *_checks(inputs)])
    return text or "None of these results has a speed with streamed layers."


def _headline(document: Document) -> BenchRow | None:
    """Returns the row for the summary: Outcore in the least memory, not on a busy machine."""
    rows = [r for r in document.rows if r.mode == "outcore" and r.error is None and speed(r) and streams(r)]
    rows = [r for r in rows if not r.busy]
    return min(rows, key=lambda r: r.use.peak_memory_bytes or r.setting.budget_bytes or float("inf"), default=None)


def _sentence(d: Document, row: BenchRow) -> str:
    memory = f" in {size(row.use.peak_memory_bytes)}" if row.use.peak_memory_bytes else ""
    what = f"{d.model.name} ({size(d.model.nbytes)} of weights) makes {number(speed(row))} tokens per second{memory}"
    return f"On {tables.machine_name(d.machine)}, {what}."


def _checks(inputs: Inputs) -> list[str]:
    rows = [r for d in inputs.documents for r in d.rows]
    compared = [r for r in rows if r.same_tokens is not None]
    different, busy = sum(r.same_tokens is False for r in compared), sum(r.busy for r in rows)
    failed = sum(r.error is not None for r in rows)
    out = []
    if different:
        out.append(f"{different} of {len(compared)} rows gave OTHER TOKENS than mlx-lm.")
    elif compared:
        out.append(f"All {len(compared)} rows that were compared gave mlx-lm's tokens.")
    if busy:
        out.append(f"{busy} of {len(rows)} rows ran while the machine was busy; their speeds are not quoted here.")
    if failed:
        out.append(f"{failed} of {len(rows)} rows failed.")
    return out
