"""``outcore report``: writes an HTML page, without scripts or external files, and Markdown from result files."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import jinja2

from outcore.errors import OutcoreError
from outcore.text import printable, shown

from ..document import read_inputs
from .markdown import markdown
from .sections import Section, sections, summary


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
    print(f"{printable(str(html_file))}: {rows} rows of {len(args.results)} files")
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
