"""A report as one HTML page: no script, nothing from elsewhere, light and dark."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources

import jinja2

from outcore.text import shown

from .sections import ReportSummary, Section


def page(summary: ReportSummary, sections: Sequence[Section]) -> str:
    """The whole page."""
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
        rows=rows_of([s for s in sections if not s.name.startswith("published")]),
        published=[s for s in sections if s.name.startswith("published")],
    )
    return shown(page)


def rows_of(sections: Sequence[Section]) -> list[list[Section]]:
    """Sections of one small chart each stand side by side where there is room, two in a row; others alone."""
    rows: list[list[Section]] = []
    for section in sections:
        beside = rows and len(rows[-1]) == 1 and _small(rows[-1][0])
        if beside and _small(section):
            rows[-1].append(section)
        else:
            rows.append([section])
    return rows


def _small(section: Section) -> bool:
    return len(section.charts) == 1 and not section.wide
