"""What is printed in columns and colours."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..text import shown

WIDTH = 120
"""Characters of a line where standard output is no terminal."""


class PlainConsole(Console):
    """A console that shows text as it is: names of models and files may hold brackets and colons, and what would move a
    terminal's cursor."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Any text that is printed, in the cell of a table too."""
        return super().render_str(shown(text), **options)


def console(least: int = WIDTH, *, soft_wrap: bool = True) -> PlainConsole:
    """Standard output; as wide as its terminal, or so many characters at least, where it is none."""
    width = None if sys.stdout.isatty() else max(WIDTH, least)
    return PlainConsole(highlight=False, soft_wrap=soft_wrap, width=width)


def listing(rows: Iterable[tuple[str, str]], justify: Literal["left", "right"] = "left") -> Table:
    """Names in bold, and what there is to say of each."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(justify=justify)
    for name, value in rows:
        table.add_row(name, value)
    return table


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None) -> Table:
    """Columns, each as wide as what is in it; heads that begin with ``>`` are of numbers, and with ``~`` of texts that
    may be broken over lines."""
    made = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for head in heads:
        broken, numbers = head.startswith("~"), head.startswith(">")
        made.add_column(head.lstrip("~>"), justify="right" if numbers else "left", no_wrap=not broken, overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made
