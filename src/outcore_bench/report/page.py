"""A report as one HTML page: no script, nothing from elsewhere, light and dark."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources

import jinja2

from outcore.text import shown

from .sections import Section


def page(summary: str, sections: Sequence[Section]) -> str:
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
        sections=sections,
    )
    return shown(page)
