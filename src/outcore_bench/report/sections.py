"""What a report says, in order, from whatever there is: a section whose data does not exist is left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..document import BenchRow, Document
from ..matrix_table import lines
from . import tables
from .charts import ChartCurve, ChartPoint, ChartStrip, curves_chart, mode_colour, shares_chart, strips_chart
from .inputs import Inputs
from .published import published_tables, source
from .tables import ReportTable, ceiling, document_name, labelled, number, percent, resident_share, size, speed, streams
from .timeline import covered, drawable, timeline_chart

# Timelines a document: one for each loop, so that they can be compared.
_MOST_TIMELINES = 3
_MODE_NAMES = {"outcore": "Outcore", "plain": "the plain way", "mlx-lm": "mlx-lm, all in memory"}


@dataclass(frozen=True)
class Chart:
    """An SVG and what stands over and under it; ``narrow`` is the same for a phone."""

    heading: str
    svg: str
    note: str = ""
    narrow: str = ""


@dataclass(frozen=True)
class Section:
    """A part of a report. ``swatches`` explain colours: (series or name, text); ``said`` are sentences before the
    table, ``notes`` remarks on single rows."""

    name: str
    title: str
    text: str = ""
    table: ReportTable | None = None
    charts: tuple[Chart, ...] = ()
    swatches: tuple[tuple[str, str], ...] = ()
    said: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def sections(inputs: Inputs, *, charts: bool = True) -> list[Section]:
    """All sections that have something to show.

    Args:
        inputs: what was read.
        charts: draw; Markdown does without, and without matplotlib.
    """
    documents = inputs.documents
    found: list[Section | None] = [
        _tabled("machines", "Machine" if len(documents) < 2 else "Machines", tables.machines_table(documents)),
        _results(documents),
        *_matrices(inputs),
    ]
    if charts:
        drawn: list[Callable[[Sequence[Document]], Section | None]] = [_residency, _memory, _io, _strategies]
        found += [draw(documents) for draw in drawn]
    found.append(
        _tabled(
            "memory-reduction",
            "Memory reduction",
            tables.reduction_table(documents),
            "Peak of what MLX held, against the same model with everything in memory.",
        )
    )
    found.append(_timelines(documents, charts))
    found.append(_tabled("prediction", "Prediction against measurement", tables.prediction_table(documents)))
    found.append(_tabled("machine-comparison", "Machines compared", tables.machine_comparison(documents)))
    found.append(_tabled("perplexity", "Perplexity", tables.perplexity_table(inputs.perplexities)))
    found += _published(inputs)
    return [s for s in found if s is not None]


def _tabled(name: str, title: str, table: ReportTable | None, text: str = "") -> Section | None:
    return Section(name, title, text, table) if table else None


def _results(documents: Sequence[Document]) -> Section | None:
    table = tables.main_table(documents)
    text = (
        "Tokens per second: median, and least to most of the repeats. Ceiling: what the disk and the computation, "
        "whichever is slower, allow at best. Stall: share of the time spent waiting for a read."
    )
    if any(r.busy for d in documents for r in d.rows):
        text += " *: other programs used the machine right before; quote no such number."
    return Section("results", "What was measured", text, table, notes=tables.notes(documents)) if table else None


def _matrices(inputs: Inputs) -> list[Section]:
    """Every matrix that measured anything: what its points say, and all of them."""
    out = []
    for i, matrix in enumerate(inputs.matrices):
        table, found = tables.matrix_table(matrix), matrix.verdict()
        if table is None or found is None:
            continue
        name = f": {document_name(matrix.blank, inputs.documents)}" if len(inputs.documents) > 1 else ""
        text = "Tokens per second. Bold: the best point, or all that are equally fast. –: does not fit."
        text += " *: met a busy machine; quote no such number." if any(c.busy for c in matrix.cells) else ""
        said = tuple(lines(matrix, found))
        out.append(Section(f"matrix-{i}", f"Every budget and way of reading{name}", text, table, said=said))
    return out


def _charted(name: str, title: str, charts: list[Chart], text: str, swatches: list[tuple[str, str]]) -> Section | None:
    return Section(name, title, text, charts=tuple(charts), swatches=tuple(swatches)) if charts else None


def mode_name(mode: str) -> str:
    return _MODE_NAMES.get(mode, mode)


def _modes(documents: Sequence[Document]) -> list[str]:
    return list(dict.fromkeys(r.mode for d in documents for r in d.rows))


def _mode_swatches(documents: Sequence[Document], shown: set[str]) -> list[tuple[str, str]]:
    modes = _modes(documents)
    return [(f"series-{mode_colour(m, modes)}", mode_name(m)) for m in modes if m in shown]


def _heading(document: Document, documents: Sequence[Document]) -> str:
    return document_name(document, documents) if len(documents) > 1 else ""


def _strategies(documents: Sequence[Document]) -> Section | None:
    """All rows of a document as bars, where it has more than one loop."""
    charts, modes, shown = [], _modes(documents), set()
    for i, d in enumerate(documents):
        if len({r.mode for r in d.rows if speed(r)}) < 2:
            continue
        strips = []
        for label, row in labelled(d):
            tps, stat = speed(row), row.decode_tps
            if row.error is None and (tps is None or stat is None):
                continue
            shown.add(row.mode)
            strips.append(
                ChartStrip(
                    label,
                    None if row.error is not None else tps,
                    mode_colour(row.mode, modes),
                    row.error if row.error is not None else number(tps),
                    stat.least if stat else None,
                    stat.most if stat else None,
                    ceiling(row),
                )
            )
        heading = _heading(d, documents)
        charts.append(Chart(heading, strips_chart(f"strategies-{i}", f"Tokens per second: {d.model.name}", strips)))
    swatches = _mode_swatches(documents, shown)
    if any(ceiling(r) for d in documents for r in d.rows):
        swatches.append(("tick", "ceiling"))
    return _charted("strategies", "Strategies compared", charts, "Tokens per second; longer is better.", swatches)


def _curves(d: Document, x: Callable[[BenchRow], float | None], modes: Sequence[str]) -> list[ChartCurve]:
    """One curve a loop, and the ceiling of this project's own."""
    points: dict[str, list[ChartPoint]] = {}
    ceilings: list[ChartPoint] = []
    for row in d.rows:
        at, stat, best = x(row), row.decode_tps, ceiling(row)
        if row.error is not None or at is None or stat is None or stat.median <= 0:
            continue
        points.setdefault(row.mode, []).append(ChartPoint(at, stat.median, stat.least, stat.most))
        if best is not None and row.mode == "outcore":
            ceilings.append(ChartPoint(at, best, best, best))
    if sum(map(len, points.values())) < 2 or len({p.x for ps in points.values() for p in ps}) < 2:
        return []
    curves = [ChartCurve(mode_name(m), mode_colour(m, modes), tuple(ps)) for m, ps in points.items()]
    return ([ChartCurve("ceiling", 0, tuple(ceilings), dashed=True)] if len(ceilings) > 1 else []) + curves


def _telling(documents: Sequence[Document], x: Callable[[BenchRow], float | None]) -> list[Document]:
    """Documents whose curve has three points or more; where none has, all: two points are told by the table."""

    def points(d: Document) -> int:
        return len({x(r) for r in d.rows if r.mode == "outcore" and r.error is None and x(r) is not None})

    return [d for d in documents if points(d) > 2] or list(documents)


def _residency(documents: Sequence[Document]) -> Section | None:
    charts, modes = [], _modes(documents)
    for i, d in enumerate(_telling(documents, resident_share)):
        if curves := _curves(d, resident_share, modes):
            svg = curves_chart(
                f"residency-{i}",
                f"Speed against layers in memory: {d.model.name}",
                curves,
                "layers in memory",
                x_percent=True,
            )
            charts.append(Chart(_heading(d, documents), svg))
    return _charted("residency", "Speed against residency", charts, "", [])


def _memory(documents: Sequence[Document]) -> Section | None:
    charts, modes = [], _modes(documents)
    for i, d in enumerate(_telling(documents, resident_share)):
        unit, name = (1e9, "GB") if d.model.nbytes >= 1e9 else (1e6, "MB")

        def peak(row: BenchRow, unit: float = unit) -> float | None:
            return row.peak_memory_bytes / unit if row.peak_memory_bytes else None

        if curves := _curves(d, peak, modes):
            title = f"Speed against memory: {d.model.name}"
            svg = curves_chart(f"memory-{i}", title, curves, f"peak memory, {name}")
            charts.append(Chart(_heading(d, documents), svg))
    return _charted("memory", "Speed against memory", charts, "", [])


def _io(documents: Sequence[Document]) -> Section | None:
    charts = []
    for i, d in enumerate(documents):
        rows = [
            (label, row.io_share, row.stall_share)
            for label, row in labelled(d)
            if row.error is None and row.io_share is not None and row.stall_share is not None
        ]
        if rows:
            svg = shares_chart(f"io-{i}", f"I/O share: {d.model.name}", rows)
            charts.append(Chart(_heading(d, documents), svg))
    swatches = [("soft", "reading while computing"), ("series-1", "waiting for a read"), ("grid", "no read under way")]
    return _charted("io-share", "I/O share", charts, "Where the time of a token goes.", swatches)


def timeline_rows(document: Document) -> list[tuple[str, BenchRow]]:
    """For each loop, the row with the most streamed layers that kept a timeline."""
    best: dict[str, tuple[str, BenchRow]] = {}
    for label, row in labelled(document):
        if row.error is None and drawable(row.timeline):
            kept = best.get(row.mode)
            if kept is None or (row.streamed_units or 0) > (kept[1].streamed_units or 0):
                best[row.mode] = (label, row)
    return sorted(best.values(), key=lambda pair: pair[1].mode != "outcore")[:_MOST_TIMELINES]


def overlap_text(row: BenchRow) -> str:
    """How much of one sweep's reading ran while something was computed."""
    reading, computing, both = covered(row.timeline or [])
    return (
        f"{number(1000 * reading)} ms of reads and {number(1000 * computing)} ms of compute in one sweep; "
        f"{percent(both / reading if reading else None)} of the reading ran during compute."
    )


def _timelines(documents: Sequence[Document], draw: bool) -> Section | None:
    charts = []
    for i, d in enumerate(documents):
        rows = timeline_rows(d)
        until = max((b.end for _, row in rows for b in row.timeline or ()), default=0.0)
        for j, (label, row) in enumerate(rows):
            names = [n for n in (_heading(d, documents), label) if n]
            title, bars = f"One sweep: {label}", row.timeline or []
            wide = timeline_chart(f"timeline-{i}-{j}", title, bars, 9.6, until) if draw else ""
            narrow = timeline_chart(f"phone-{i}-{j}", title, bars, 4.6, until) if draw else ""
            charts.append(Chart(" · ".join(names), wide, overlap_text(row), narrow))
    return _charted("timeline", "Timeline of one sweep", charts, "Numbers over the bars are layers.", [])


def _published(inputs: Inputs) -> list[Section]:
    """The paper's tables that have a model of ours in them."""
    compared = [t for t in published_tables(inputs) if t.ours]
    return [
        Section(f"published-{t.number}", f"Published table {t.number}: {t.title}", first, t.table)
        for t, first in zip(compared, [source(), *[""] * len(compared)], strict=False)
    ]


@dataclass(frozen=True)
class Tile:
    """One of the three numbers that matter."""

    value: str
    text: str


@dataclass(frozen=True)
class ReportSummary:
    """The beginning of a report: numbers, and a paragraph."""

    tiles: tuple[Tile, ...]
    text: str


def headline(document: Document) -> BenchRow | None:
    """The row that a summary is about: Outcore in the least memory. None that met a busy machine."""
    rows = [r for r in document.rows if r.mode == "outcore" and r.error is None and speed(r) and streams(r)]
    rows = [r for r in rows if not r.busy]
    return min(rows, key=lambda r: r.peak_memory_bytes or r.budget_bytes or float("inf")) if rows else None


def summary(inputs: Inputs) -> ReportSummary:
    """Speed, share of the ceiling, and memory of the largest model; a sentence for each machine's fullest document."""
    told = [(d, row) for d in inputs.documents if (row := headline(d)) is not None]
    fullest: dict[str, tuple[Document, BenchRow]] = {}
    for d, row in sorted(told, key=lambda pair: (len(pair[0].rows), pair[0].model.nbytes)):
        fullest[tables.machine_name(d.machine)] = (d, row)
    sentences = [_sentence(d, row) for d, row in fullest.values()]
    tiles: list[Tile] = []
    if told:
        d, row = max(told, key=lambda pair: pair[0].model.nbytes)
        memory = size(row.peak_memory_bytes) or row.memory or size(row.budget_bytes)
        where = f" on {tables.machine_name(d.machine)}" if len(inputs.documents) > 1 else ""
        tiles.append(Tile(f"{number(speed(row))} tokens/s", d.model.name + (f" in {memory}" if memory else "") + where))
        if (efficiency := _efficiency(d, row)) is not None:
            tiles.append(Tile(percent(efficiency), "of the ceiling that disk and computation set"))
        less = tables.reduction(d, row)
        if less is not None and less > 0:
            full = tables.resident_reference(d)
            tiles.append(Tile(f"{percent(less)} less memory", f"than {full.label if full else 'the weights alone'}"))
    sentences += _checks(inputs)
    return ReportSummary(
        tuple(tiles), " ".join(sentences) or "No row of these results has a speed with streamed layers."
    )


def _sentence(d: Document, row: BenchRow) -> str:
    peak = size(row.peak_memory_bytes)
    text = f"{d.model.name} ({size(d.model.nbytes)} of weights) makes {number(speed(row))} tokens per second"
    text += f" in {peak}" if peak else ""
    best, efficiency = ceiling(row), _efficiency(d, row)
    if best is not None and efficiency is not None:
        text += f", {percent(efficiency)} of the {number(best)} that disk and computation allow"
    plain = [r for r in d.rows if r.mode == "plain" and r.error is None and speed(r) and not r.busy]
    same = [r for r in plain if r.resident_units == row.resident_units] or plain
    if same:
        fold = (speed(row) or 0) / max(speed(r) or 0 for r in same)
        text += f", {number(fold)} times the speed of {mode_name('plain')}"
    full = tables.resident_reference(d)
    less = tables.reduction(d, row)
    if full and less is not None and less > 0 and speed(full) and not full.busy:
        text += f"; {mode_name(full.mode)}, makes {number(speed(full))} in {size(full.peak_memory_bytes)}"
    return f"On {tables.machine_name(d.machine)}, {text}."


def _efficiency(d: Document, row: BenchRow) -> float | None:
    """A row's share of the ceiling, unless the resident run that its compute time comes from met a busy machine."""
    resident = [r for r in d.rows if r.mode == "outcore" and r.io == "none" and r.batch == row.batch]
    return None if row.compute_share is not None and any(r.busy for r in resident) else row.efficiency


def _checks(inputs: Inputs) -> list[str]:
    rows = [r for d in inputs.documents for r in d.rows]
    compared = [r for r in rows if r.same_tokens is not None]
    busy = sum(r.busy for r in rows)
    different, failed = sum(r.same_tokens is False for r in compared), sum(r.error is not None for r in rows)
    out = []
    if different:
        out.append(f"{different} of {len(compared)} rows made OTHER TOKENS than mlx-lm.")
    elif compared:
        out.append(f"All {len(compared)} rows that were compared made mlx-lm's tokens.")
    if busy:
        out.append(f"{busy} of {len(rows)} rows met a busy machine; no speed of theirs is told here.")
    if failed:
        out.append(f"{failed} of {len(rows)} rows failed.")
    return out
