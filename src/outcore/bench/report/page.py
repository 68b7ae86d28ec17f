"""A report as one HTML page: no script, nothing from elsewhere, light and dark."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib import resources

from .sections import Chart, Section, Summary
from .tables import Line, Table


def page(summary: Summary, sections: Sequence[Section]) -> str:
    """The whole page."""
    style = (resources.files(__package__) / "page.css").read_text(encoding="utf-8")
    shown = [s for s in sections if not s.name.startswith("published")]
    published = [s for s in sections if s.name.startswith("published")]
    body = [_summary(summary), *_with_pairs(shown)]
    if published:
        body.append('<section id="published"><h2>The paper\'s tables, ours beside them</h2>')
        body += [_published(s) for s in published] + ["</section>"]
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            "<title>Outcore: results</title>",
            f"<style>\n{style}</style></head><body><main>",
            *body,
            "</main></body></html>",
            "",
        ]
    )


def _summary(summary: Summary) -> str:
    tiles = "".join(
        f"<div><strong>{escape(t.value)}</strong><span>{escape(t.text)}</span></div>" for t in summary.tiles
    )
    shown = f'<div class="tiles">{tiles}</div>' if tiles else ""
    return f'<header><h1>Outcore: results</h1><p class="lead">{escape(summary.text)}</p>{shown}</header>'


def _with_pairs(sections: Sequence[Section]) -> list[str]:
    """Sections of one small chart each stand side by side where there is room."""
    out: list[str] = []
    row: list[Section] = []

    def flush() -> None:
        if len(row) > 1:
            out.append('<div class="pair">' + "".join(map(_section, row)) + "</div>")
        else:
            out.extend(map(_section, row))
        row.clear()

    for section in sections:
        if len(section.charts) == 1 and not section.charts[0].narrow and not section.table:
            row.append(section)
            if len(row) == 2:
                flush()
        else:
            flush()
            out.append(_section(section))
    flush()
    return out


def _section(section: Section) -> str:
    parts = [f'<section id="{section.name}"><h2>{escape(section.title)}</h2>']
    if section.swatches:
        keys = "".join(f'<li><i class="{escape(c)}"></i>{escape(text)}</li>' for c, text in section.swatches)
        parts.append(f'<ul class="key">{keys}</ul>')
    if section.table:
        parts.append(_table(section.table))
    if section.charts:
        kind = "wide" if section.charts[0].narrow else "charts"
        parts.append(f'<div class="{kind}">' + "".join(map(_chart, section.charts)) + "</div>")
    if section.text:
        parts.append(f'<p class="note">{escape(section.text)}</p>')
    if section.notes:
        items = "".join(f"<li>{escape(n)}</li>" for n in section.notes)
        parts.append(f'<details class="note"><summary>{len(section.notes)} notes</summary><ul>{items}</ul></details>')
    return "\n".join([*parts, "</section>"])


def _chart(chart: Chart) -> str:
    heading = f"<h3>{escape(chart.heading)}</h3>" if chart.heading else ""
    note = f"<figcaption>{escape(chart.note)}</figcaption>" if chart.note else ""
    if chart.narrow:
        drawn = f'<div class="on-desk">{chart.svg}</div><div class="on-phone">{chart.narrow}</div>'
    else:
        drawn = chart.svg
    return f"<figure>{heading}{note}{drawn}</figure>"


def _published(section: Section) -> str:
    """Open where there are rows of ours; the first one says where theirs come from."""
    assert section.table is not None
    first = f'<p class="note">{escape(section.text)}</p>' if section.text else ""
    state = "" if section.folded else " open"
    title = escape(section.title.removeprefix("Published "))
    return (
        f'{first}<details id="{section.name}"{state}><summary>{title[:1].upper()}{title[1:]}</summary>'
        f"{_table(section.table)}</details>"
    )


def _table(table: Table) -> str:
    kinds = ["text" if i == 0 or c in table.text else "number" for i, c in enumerate(table.columns)]
    head = "".join(f'<th class="{k}">{escape(c)}</th>' for k, c in zip(kinds, table.columns, strict=True))
    lines = "\n".join(_line(line, kinds) for line in table.lines)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n{lines}\n</tbody></table></div>'


def _line(line: Line, kinds: Sequence[str]) -> str:
    if line.kind == "group":
        return f'<tr class="group"><th colspan="{len(kinds)}">{escape(line.cells[0])}</th></tr>'
    if line.kind == "error":
        name, what = map(escape, line.cells)
        return f'<tr class="error"><td class="text">{name}</td><td colspan="{max(1, len(kinds) - 1)}">{what}</td></tr>'
    cells = "".join(f'<td class="{k}">{_cell(c, k)}</td>' for k, c in zip(kinds, line.cells, strict=True))
    return f'<tr class="{line.kind}">{cells}</tr>' if line.kind else f"<tr>{cells}</tr>"


def _cell(text: str, kind: str) -> str:
    """A number's spread stands smaller beside it, or under it on a phone."""
    value, opened, spread = text.partition(" (")
    if kind == "number" and opened:
        return f"{escape(value)} <small>({escape(spread)}</small>"
    return escape(text)
