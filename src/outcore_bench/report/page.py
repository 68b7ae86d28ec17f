"""``outcore report``: makes an HTML page (without scripts or external files) and Markdown from result files. A section
without data is left out."""

from __future__ import annotations

import argparse
import html
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

import jinja2

from outcore.errors import OutcoreError
from outcore.text import printable, shown

from ..document import BenchRow, Document, Inputs, Stat, read_inputs
from . import tables
from .tables import ReportTable, by_budget, ceiling, document_name, number, place, sentences, size, speed, streams

# Names of modes in charts. Each has a colour.
_MODES = {"outcore": "Outcore", "plain": "naive streaming", "mlx-lm": "mlx-lm, all in memory"}


@dataclass(frozen=True)
class Chart:
    heading: str
    svg: str


@dataclass(frozen=True)
class Section:
    """A part of a report. ``verdict``: sentences before the table; ``notes``: remarks about single rows."""

    name: str
    title: str
    text: str = ""
    table: ReportTable | None = None
    charts: tuple[Chart, ...] = ()
    verdict: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def sections(inputs: Inputs) -> list[Section]:
    documents = [replace(d, rows=sorted(d.rows, key=place)) if _is_matrix(d) else d for d in _quiet(inputs)]
    many = "s" * (len(documents) > 1)
    verdicts = tuple(line for d in documents if _is_matrix(d) for line in sentences(d.rows))
    main = tables.main_table(documents)
    charts = [_chart(d, document_name(d, documents) if many else "") for d in _best(documents)]
    found = [
        Section("machines", f"Machine{many}", "", tables.machines_table(documents)),
        Section("results", "Results", tables.LEGEND, main, verdict=verdicts, notes=tables.notes(documents)),
        Section("memory", "Speed against memory", charts=tuple(chart for chart in charts if chart is not None)),
        Section("perplexity", "Perplexity", "", tables.perplexity_table(inputs.perplexities)),
        Section("left-out", "Left out", verdict=tables.left_out(inputs.documents)),
    ]
    return [s for s in found if s.table or s.charts or s.verdict]


def _quiet(inputs: Inputs) -> list[Document]:
    """The documents without the rows of a busy machine, of which a report tells no number."""
    return [replace(d, rows=[r for r in d.rows if not r.busy]) for d in inputs.documents]


def _is_matrix(document: Document) -> bool:
    return "grid" in document.settings


def _best(documents: Sequence[Document]) -> list[Document]:
    return [replace(d, rows=by_budget(d.rows)) if _is_matrix(d) else d for d in documents]


def _chart(document: Document, heading: str) -> Chart | None:
    """Draws speed over peak memory: a curve for each mode and batch, and Outcore's ceiling. None if all rows have one
    peak."""
    points, ceilings = dict[str, list[tuple[float, Stat]]](), dict[str, list[tuple[float, Stat]]]()
    colours: dict[str, str] = {}
    several = len({row.setting.batch for row in document.rows}) > 1
    for row in document.rows:
        stat, best = row.speed.decode_tps, ceiling(row)
        if row.error is None and row.use.peak_memory_bytes and stat is not None and stat.median > 0:
            at, batch = row.use.peak_memory_bytes / 1e9, f", batch {row.setting.batch}" * several
            name = _MODES.get(row.mode, row.mode) + batch
            number = list(_MODES).index(row.mode) if row.mode in _MODES and not several else len(points) % 6
            colours.setdefault(name, f"--series-{number}")
            points.setdefault(name, []).append((at, stat))
            if best is not None and row.mode == "outcore":
                ceilings.setdefault("ceiling" + batch, []).append((at, Stat(best, best, best, 1)))
    if len({at for marks in points.values() for at, _ in marks}) < 2:
        return None
    curves = [ChartCurve(name, colours[name], tuple(marks)) for name, marks in points.items()]
    lines = [(name, tuple(marks)) for name, marks in ceilings.items() if len(marks) > 1]
    curves += [ChartCurve(name, "--muted", marks, dashed=True) for name, marks in lines]
    return Chart(heading, curves_chart(f"Speed against memory: {document.model.name}", curves, "peak memory, GB"))


def summary(inputs: Inputs) -> str:
    headlines = [(d, row) for d in _best(_quiet(inputs)) if (row := _headline(d)) is not None]
    fullest = {}
    for d, row in sorted(headlines, key=lambda pair: (len(pair[0].rows), pair[0].model.nbytes)):
        fullest[tables.machine_name(d.machine)] = _sentence(d, row)
    text = " ".join([*fullest.values(), *_checks(inputs)])
    return text or "None of these results has a speed with streamed layers."


def _headline(document: Document) -> BenchRow | None:
    rows = [r for r in document.rows if r.mode == "outcore" and r.error is None and speed(r) and streams(r)]
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
        out.append(f"{busy} of {len(rows)} rows ran on a busy machine and are left out.")
    if failed:
        out.append(f"{failed} of {len(rows)} rows failed.")
    return out


WIDTH, HEIGHT, LEFT, BOTTOM = 460, 300, 44, 36
# Most grid lines and labels of each axis, not counting 0.
STEPS = 5


@dataclass(frozen=True)
class ChartCurve:
    name: str
    colour: str
    points: tuple[tuple[float, Stat], ...]
    dashed: bool = False


def curves_chart(title: str, curves: Sequence[ChartCurve], x_label: str) -> str:
    most_x = max(x for curve in curves for x, _ in curve.points)
    stats = [stat for curve in curves for _, stat in curve.points]
    least_y, most_y = min(stat.least for stat in stats), max(stat.most for stat in stats)
    # Of speeds that are this far apart, the lower ones would lie on the axis.
    powers = [10.0**n for n in range(math.floor(math.log10(least_y)), math.ceil(math.log10(most_y)) + 1)]
    logarithmic = most_y > 20 * least_y
    foot, legend = HEIGHT - BOTTOM, 16 * len(curves)

    def at(x: float, y: float) -> tuple[float, float]:
        up = math.log(y / powers[0]) / math.log(powers[-1] / powers[0]) if logarithmic else y / most_y
        return LEFT + x / most_x * (WIDTH - LEFT - 16), foot - up * (foot - 24)

    def text(x: float, y: float, words: str, anchor: str = "start", colour: str = "--muted") -> str:
        content = html.escape(shown(words))
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

    parts = [
        text(LEFT, 14, "tokens per second" + ", logarithmic" * logarithmic),
        text(WIDTH - 16, HEIGHT - 4, x_label, "end"),
    ]
    for value in powers if logarithmic else _ticks(most_y):
        y = at(0, value)[1]
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - 16}" stroke="var(--grid)"/>')
        parts.append(text(LEFT - 4, y + 4, f"{value:g}", "end"))
    parts += [text(at(value, most_y)[0], foot + 16, f"{value:g}", "middle") for value in _ticks(most_x)]
    for i, curve in enumerate(curves):
        parts += [*drawn(curve), text(LEFT, HEIGHT + 14 + 16 * i, curve.name, colour=curve.colour)]
    box = f'viewBox="0 0 {WIDTH} {HEIGHT + legend + 4}"'
    return f'<svg {box} role="img" aria-label="{html.escape(shown(title))}">{"".join(parts)}</svg>'


def _ticks(most: float) -> list[float]:
    """Round numbers from 0 to ``most``: multiples of 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(most / STEPS))
    step = next(n * power for n in (1, 2, 5, 10) if n * power * STEPS >= most)
    return [i * step for i in range(int(most / step) + 1)]


def run(args: argparse.Namespace) -> None:
    inputs = read_inputs(args.results)
    is_page = args.output.suffix.lower() in (".html", ".htm")
    html_file = args.output if is_page else args.output / "report.html"
    text_file = None if is_page else args.output / "report.md"
    begin, drawn = summary(inputs), sections(inputs)
    _write(html_file, page(begin, drawn))
    if text_file:
        _write(text_file, markdown(begin, drawn))
    rows = sum(len(d.rows) for d in inputs.documents)
    busy = sum(row.busy for d in inputs.documents for row in d.rows)
    left = f"; {busy} left out, because the machine was busy" if busy else ""
    print(f"{printable(str(html_file))}: {rows} rows of {len(args.results)} files{left}")
    args.result.record = {
        "html": str(html_file),
        "markdown": str(text_file) if text_file else None,
        "documents": len(inputs.documents),
        "rows": rows,
        "perplexity_rows": sum(len(p.rows) for p in inputs.perplexities),
        "sections": [s.name for s in drawn],
    }


def _write(file: Path, text: str) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as e:
        raise OutcoreError(f"{file}: cannot write: {e.strerror or e}") from e


def page(summary: str, sections: Sequence[Section]) -> str:
    folder = resources.files(__package__)
    templates = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    template = templates.from_string((folder / "templates" / "page.html.jinja").read_text(encoding="utf-8"))
    page = template.render(
        style=(folder / "templates" / "page.css").read_text(encoding="utf-8"),
        summary=summary,
        sections=sections,
    )
    return shown(page)


_SPECIAL = re.compile(r"([\\`*_\[\]<>|#])")


def markdown(summary: str, sections: Sequence[Section]) -> str:
    parts = ["# Outcore: results", escape(summary)]
    for section in sections:
        parts.append(f"## {escape(section.title)}")
        if section.text and (section.table or not section.charts):
            parts.append(escape(section.text))
        if section.verdict:
            parts.append("\n".join(f"- {escape(text)}" for text in section.verdict))
        if section.table:
            parts.append(_table(section.table))
        if section.notes:
            parts.append("\n".join(f"- Note: {escape(n)}" for n in section.notes))
    return shown("\n\n".join(parts) + "\n")


def escape(text: str) -> str:
    return _SPECIAL.sub(r"\\\1", " ".join(text.split()))


def _table(table: ReportTable) -> str:
    rows = [list(map(escape, table.columns)), ["---" if kind == "text" else "---:" for kind in table.kinds]]
    for line in table.lines:
        cells = [f"**{escape(c)}**" if line.kind == "group" else escape(c) for c in line.cells]
        rows.append(cells + [""] * (len(table.columns) - len(cells)))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
