"""``outcore report``: makes an HTML page (without scripts or external files) and Markdown from result files."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import jinja2

from outcore.errors import OutcoreError
from outcore.text import printable, shown

from ..document import read_inputs
from .sections import Section, sections, summary
from .tables import ReportTable


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
