"""Writes a report as Markdown: the tables and sentences, without the charts."""

from __future__ import annotations

import re
from collections.abc import Sequence

from outcore.text import shown

from .sections import Section
from .tables import ReportTable

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
    """Escapes Markdown's special characters, and joins lines."""
    return _SPECIAL.sub(r"\\\1", " ".join(text.split()))


def _table(table: ReportTable) -> str:
    rows = [list(map(escape, table.columns)), ["---" if kind == "text" else "---:" for kind in table.kinds]]
    for line in table.lines:
        cells = [f"**{escape(c)}**" if line.kind == "group" else escape(c) for c in line.cells]
        rows.append(cells + [""] * (len(table.columns) - len(cells)))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
