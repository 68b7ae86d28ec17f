"""What a report says, in order, from whatever there is: a section whose data does not exist is left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..devices import published_data
from ..document import BenchRow, Document, Stat, TimelineBar
from . import tables
from .charts import MODES, MUTED, SERIES, ChartCurve, curves_chart, timeline_chart
from .inputs import Inputs
from .published import published_tables
from .tables import ReportTable, ceiling, document_name, labelled, number, percent, resident_share, size, speed, streams

_MODE_NAMES = {"outcore": "Outcore", "plain": "the plain way", "mlx-lm": "mlx-lm, all in memory"}


@dataclass(frozen=True)
class Chart:
    """An SVG and what stands over it."""

    heading: str
    svg: str
    note: str = ""


@dataclass(frozen=True)
class Section:
    """A part of a report. ``said`` are sentences before the table, ``notes`` remarks on single rows; ``wide``: its
    charts take a whole line each."""

    name: str
    title: str
    text: str = ""
    table: ReportTable | None = None
    charts: tuple[Chart, ...] = ()
    said: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    wide: bool = False


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


def sections(inputs: Inputs, *, charts: bool = True) -> list[Section]:
    """All sections that have something to show.

    Args:
        inputs: what was read.
        charts: draw; Markdown does without, and without matplotlib.
    """
    documents = inputs.documents
    text = tables.LEGEND + tables.BUSY_LEGEND * any(r.busy for d in documents for r in d.rows)
    many = "s" * (len(documents) > 1)
    found = [
        Section("machines", f"Machine{many}", "", tables.machines_table(documents)),
        Section("results", "What was measured", text, tables.main_table(documents), notes=tables.notes(documents)),
        *_matrices(inputs),
        *(_curves(documents) if charts else []),
        Section("timeline", "Timeline of one sweep", charts=_timelines(documents, charts), wide=True),
        Section("perplexity", "Perplexity", "", tables.perplexity_table(inputs.perplexities)),
    ]
    compared = [t for t in published_tables(inputs) if t.ours]
    for i, t in enumerate(compared):
        title = f"Published table {t.number}: {t.title}"
        found.append(Section(f"published-{t.number}", title, "" if i else published_data()["source"], t.table))
    return [s for s in found if s.table or s.charts]


def _matrices(inputs: Inputs) -> list[Section]:
    """Every matrix that measured anything: what its points say, and all of them."""
    out = []
    for i, matrix in enumerate(inputs.matrices):
        name = f": {document_name(matrix.blank, inputs.documents)}" if len(inputs.documents) > 1 else ""
        text = "Tokens per second. Bold: the best point, or all that are equally fast. –: does not fit."
        text += " *: met a busy machine; quote no such number." if any(c.busy for c in matrix.cells) else ""
        title, table = f"Every budget and way of reading{name}", tables.matrix_table(matrix)
        out.append(Section(f"matrix-{i}", title, text, table, said=tuple(matrix.lines())))
    return out


def _curves(documents: Sequence[Document]) -> list[Section]:
    """Speed against layers in memory, and against peak memory, of documents with two places or more."""
    residency, memory = [], []
    for i, d in enumerate(documents):
        unit, name = (1e9, "GB") if d.model.nbytes >= 1e9 else (1e6, "MB")

        def peak(row: BenchRow, unit: float = unit) -> float | None:
            return row.use.peak_memory_bytes / unit if row.use.peak_memory_bytes else None

        heading = document_name(d, documents) if len(documents) > 1 else ""
        if curves := _curves_of(d, resident_share):
            title = f"Speed against layers in memory: {d.model.name}"
            svg = curves_chart(f"residency-{i}", title, curves, "layers in memory", x_percent=True)
            residency.append(Chart(heading, svg))
        if curves := _curves_of(d, peak):
            title = f"Speed against memory: {d.model.name}"
            memory.append(Chart(heading, curves_chart(f"memory-{i}", title, curves, f"peak memory, {name}")))
    return [
        Section("residency", "Speed against residency", charts=tuple(residency)),
        Section("memory", "Speed against memory", charts=tuple(memory)),
    ]


def _curves_of(d: Document, x: Callable[[BenchRow], float | None]) -> list[ChartCurve]:
    """One curve a loop, and the ceiling of this project's own; none where all have one place."""
    points: dict[str, list[tuple[float, Stat]]] = {}
    for row in d.rows:
        at, stat, best = x(row), row.speed.decode_tps, ceiling(row)
        if row.error is not None or at is None or stat is None or stat.median <= 0:
            continue
        points.setdefault(row.mode, []).append((at, stat))
        if best is not None and row.mode == "outcore":
            points.setdefault("ceiling", []).append((at, Stat(best, best, best, 1)))
    if len({at for mode, marks in points.items() if mode != "ceiling" for at, _ in marks}) < 2:
        return []
    return [
        ChartCurve(mode, MUTED, tuple(marks), dashed=True)
        if mode == "ceiling"
        else ChartCurve(_MODE_NAMES.get(mode, mode), SERIES[MODES.get(mode, len(MODES))], tuple(marks))
        for mode, marks in points.items()
    ]


def covered(bars: Sequence[TimelineBar], *kinds: str) -> float:
    """Seconds in which at least one bar of these kinds was under way."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted((b.begin, b.end) for b in bars if b.kind in kinds):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def overlap_text(row: BenchRow) -> str:
    """How much of one sweep's reading ran while something was computed."""
    bars = row.timeline or []
    reading, computing = covered(bars, "read"), covered(bars, "compute")
    both = reading + computing - covered(bars, "read", "compute")
    return (
        f"{number(1000 * reading)} ms of reads and {number(1000 * computing)} ms of compute in one sweep; "
        f"{percent(both / reading if reading else None)} of the reading ran during compute."
    )


def _timelines(documents: Sequence[Document], draw: bool) -> tuple[Chart, ...]:
    """For each loop, the row with the most streamed layers that kept a timeline."""
    charts = []
    for i, d in enumerate(documents):
        most: dict[str, tuple[str, BenchRow]] = {}
        for label, row in sorted(labelled(d), key=lambda pair: pair[1].setting.streamed_units or 0):
            if row.error is None and {"read", "compute"} <= {b.kind for b in row.timeline or ()}:
                most[row.mode] = (label, row)
        until = max((b.end for _, row in most.values() for b in row.timeline or ()), default=0.0)
        for j, (label, row) in enumerate(most.values()):
            heading = f"{document_name(d, documents)} · {label}" if len(documents) > 1 else label
            svg = ""
            if draw:
                svg = timeline_chart(f"timeline-{i}-{j}", f"One sweep: {label}", row.timeline or [], until)
            charts.append(Chart(heading, svg, overlap_text(row)))
    return tuple(charts)


def summary(inputs: Inputs) -> ReportSummary:
    """Speed, share of the ceiling, and memory of the largest model; a sentence for each machine's fullest document."""
    told = [(d, row) for d in inputs.documents if (row := _headline(d)) is not None]
    fullest = {}
    for d, row in sorted(told, key=lambda pair: (len(pair[0].rows), pair[0].model.nbytes)):
        fullest[tables.machine_name(d.machine)] = _sentence(d, row)
    tiles: list[Tile] = []
    if told:
        d, row = max(told, key=lambda pair: pair[0].model.nbytes)
        memory = size(row.use.peak_memory_bytes) or row.setting.memory or size(row.setting.budget_bytes)
        where = f" on {tables.machine_name(d.machine)}" if len(inputs.documents) > 1 else ""
        tiles.append(Tile(f"{number(speed(row))} tokens/s", d.model.name + (f" in {memory}" if memory else "") + where))
        if (efficiency := _efficiency(d, row)) is not None:
            tiles.append(Tile(percent(efficiency), "of the ceiling that disk and computation set"))
        less, full = tables.reduction(d, row), tables.resident_reference(d)
        if less is not None and less > 0:
            tiles.append(Tile(f"{percent(less)} less memory", f"than {full.label if full else 'the weights alone'}"))
    text = " ".join([*fullest.values(), *_checks(inputs)])
    return ReportSummary(tuple(tiles), text or "No row of these results has a speed with streamed layers.")


def _headline(document: Document) -> BenchRow | None:
    """The row that a summary is about: Outcore in the least memory. None that met a busy machine."""
    rows = [r for r in document.rows if r.mode == "outcore" and r.error is None and speed(r) and streams(r)]
    rows = [r for r in rows if not r.busy]
    return min(rows, key=lambda r: r.use.peak_memory_bytes or r.setting.budget_bytes or float("inf"), default=None)


def _sentence(d: Document, row: BenchRow) -> str:
    text = f"{d.model.name} ({size(d.model.nbytes)} of weights) makes {number(speed(row))} tokens per second"
    text += f" in {size(row.use.peak_memory_bytes)}" if row.use.peak_memory_bytes else ""
    best, efficiency = ceiling(row), _efficiency(d, row)
    if best is not None and efficiency is not None:
        text += f", {percent(efficiency)} of the {number(best)} that disk and computation allow"
    plain = [r for r in d.rows if r.mode == "plain" and r.error is None and speed(r) and not r.busy]
    same = [r for r in plain if r.setting.resident_units == row.setting.resident_units] or plain
    if same:
        fold = (speed(row) or 0) / max(speed(r) or 0 for r in same)
        text += f", {number(fold)} times the speed of the plain way"
    full = tables.resident_reference(d)
    if full is not None and speed(full) and not full.busy:
        name = _MODE_NAMES.get(full.mode, full.mode)
        text += f"; {name}, makes {number(speed(full))} in {size(full.use.peak_memory_bytes)}"
    return f"On {tables.machine_name(d.machine)}, {text}."


def _efficiency(d: Document, row: BenchRow) -> float | None:
    """A row's share of the ceiling, unless the resident run that its compute time comes from met a busy machine."""
    resident = [r for r in d.rows if r.mode == "outcore" and r.setting.io == "none"]
    busy = any(r.busy for r in resident if r.setting.batch == row.setting.batch)
    return None if row.ceiling.compute_share is not None and busy else row.ceiling.efficiency


def _checks(inputs: Inputs) -> list[str]:
    rows = [r for d in inputs.documents for r in d.rows]
    compared = [r for r in rows if r.same_tokens is not None]
    different, busy = sum(r.same_tokens is False for r in compared), sum(r.busy for r in rows)
    failed = sum(r.error is not None for r in rows)
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
