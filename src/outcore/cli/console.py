"""Tables and colours for the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..text import shown

WIDTH = 120


class PlainConsole(Console):
    """A rich console that prints text literally: no markup, no emoji, control characters escaped."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(shown(text), **options)


def console(least: int = WIDTH, *, soft_wrap: bool = True) -> PlainConsole:
    """Returns a console for standard output, at least ``least`` characters wide when that is not a terminal."""
    width = None if sys.stdout.isatty() else max(WIDTH, least)
    return PlainConsole(highlight=False, soft_wrap=soft_wrap, width=width)


def listing(rows: Iterable[tuple[str, str]], justify: Literal["left", "right"] = "left") -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(justify=justify)
    for name, value in rows:
        table.add_row(name, value)
    return table


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None) -> Table:
    """Builds a table. A leading ``>`` in a head aligns the column right, for numbers; a leading ``~`` lets it wrap."""
    made = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for head in heads:
        wraps, numbers = head.startswith("~"), head.startswith(">")
        made.add_column(head.lstrip("~>"), justify="right" if numbers else "left", no_wrap=not wraps, overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made
